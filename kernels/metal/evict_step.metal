// One threadgroup per row: the mass of every slot, then the slot that loses, whose position becomes -1.
//
//   mass_out = mass * decay + attention      (0 for an absent one; no decay where the arrival is padded)
//   importance = sign * (mass_out / max(counted - position, 1)) + tau * noise
//
// Template: MASSIVE, DECAYS (by DECAY, the bits of a float), GUARDED_DECAY (the arrival may be padded), ATTENDED, AGED, DRAWN, SCHEDULED, KEEP_LOW (bool), FIRST, RISE, FALLS,
// STEPS, START (the schedule of tau where SCHEDULED), SINK, RECENT (int).

const uint row = threadgroup_position_in_grid.x;
const uint lane = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint length = positions_shape[1];
const int now = seen[row];
threadgroup uint ranks[96];

Rank mine = last_rank();
for (uint j = lane; j < length; j += lanes) {
  const uint at = row * length + j;
  const int position = positions[at];
  float heavy = 0.0f;
  if (MASSIVE) heavy = mass[at];
  if (DECAYS && (!GUARDED_DECAY || arrived[row] >= 0)) heavy = product(heavy, as_type<float>(uint(DECAY)));
  if (ATTENDED) heavy = heavy + attention[at];
  mass_out[at] = heavy;
  const int age = AGED ? max(counted[row] - position, 1) : 0;
  const float drawn = DRAWN ? product(SCHEDULED ? temperature(as_type<float>(uint(FIRST)), FALLS ? -as_type<float>(uint(RISE)) : as_type<float>(uint(RISE)), STEPS, START, now - 1) : float(tau[row]), noise[at]) : 0.0f;
  const float importance = importance_of(heavy, age, KEEP_LOW, drawn);
  const Rank other = rank_of(importance, position, now, SINK, RECENT, j);
  if (below(other, mine)) mine = other;
}
const uint lost = lowest(mine, ranks, lane, lanes).slot;
for (uint j = lane; j < length; j += lanes) {
  positions_out[row * length + j] = j == lost ? -1 : positions[row * length + j];
}
