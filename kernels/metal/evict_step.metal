// One threadgroup per row, of 544 lanes at most: what every slot receives, the masses with it, then the slot that loses,
// whose position becomes -1.
//
//   attention_j = sum_h weight_t exp(x_hj - top_h) / total_h / query heads    where JOINS, of the parts in `scratch`, as in
//                 attend.metal, which also give the output of every head; else as given
//   mass_out = mass * decay + attention      (0 for an absent one; no decay where the arrival is padded)
//   importance = sign * (mass_out / max(counted - position, 1)) + tau * noise
//
// A lane has SLOTS slots at a time, whose loads are under way together, and the first ones while the parts are joined.
//
// Template: SLOTS; JOINS, and then T (type of the output), DV, ALL (heads), COUNT, UNIT (int), VALUED, WEIGHTED; RANKS
// (whether a slot loses), STORES (whether mass_out is asked for), MASSIVE, DECAYS (by DECAY, the bits of a float),
// GUARDED_DECAY (the arrival may be padded), ATTENDED, AGED, DRAWN, SCHEDULED, KEEP_LOW (bool), FIRST, RISE, FALLS, STEPS,
// START (the schedule of tau where SCHEDULED), SINK, RECENT (int).

const uint row = threadgroup_position_in_grid.x;
const uint here = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint lane = here % 32;
const uint length = positions_shape[1];
const int now = RANKS ? int(seen[row]) : 0;
const uint parts = JOINS ? uint(scratch_shape[1]) : 1u;
const uint each = ((length + UNIT - 1) / UNIT + parts - 1) / parts * UNIT;
const uint block = 4 + (VALUED ? DV : 0);
auto blocks = scratch + ulong(row) * parts * ALL * (block + (ATTENDED ? each : 0u));
auto logits = blocks + parts * ALL * block;
threadgroup float shares[JOINS && VALUED ? 32 * ALL : 1];  // of a part in the output of a head
threadgroup float tops[ALL];
threadgroup float scales[ALL];
threadgroup float joined[544];
threadgroup uint ranks[96];

const bool decays = DECAYS && (!GUARDED_DECAY || arrived[row] >= 0);
const int age_of = AGED ? int(counted[row]) : 0;
const float warmth = !DRAWN ? 0.0f : (SCHEDULED ? temperature(as_type<float>(uint(FIRST)), FALLS ? -as_type<float>(uint(RISE)) : as_type<float>(uint(RISE)), STEPS, START, now - 1) : float(tau[row]));
int position[SLOTS];
Rank mine = last_rank();
for (uint begin = 0; begin < length; begin += SLOTS * lanes) {
  float heavy[SLOTS];
  float received[SLOTS];
  float drawn[SLOTS];
  float x[SLOTS];
  for (int i = 0; i < SLOTS; i++) {
    const uint j = min(begin + i * lanes + here, length - 1);
    const uint at = row * length + j;
    position[i] = RANKS ? int(positions[at]) : 0;
    heavy[i] = MASSIVE ? float(mass[at]) : 0.0f;
    drawn[i] = DRAWN ? float(noise[at]) : 0.0f;
    received[i] = ATTENDED && !JOINS ? float(attention[at]) : 0.0f;
    x[i] = ATTENDED && JOINS ? float(logits[j]) : 0.0f;
  }
  if (JOINS && begin == 0) {
    for (uint h = here / 32; h < ALL; h += lanes / 32) {
      const uint at = (min(lane, parts - 1) * ALL + h) * block;
      const float plain = lane < parts ? float(blocks[at]) : -INFINITY;
      const float plain_sum = lane < parts ? float(blocks[at + 1]) : 0.0f;
      const float top = lane < parts ? float(blocks[at + 2]) : -INFINITY;
      const float sum = lane < parts ? float(blocks[at + 3]) : 0.0f;
      if (VALUED) {
        const float highest = simd_max(plain);
        const float share = plain_sum > 0.0f ? exp(plain - highest) : 0.0f;
        const float total = simd_sum(plain_sum * share);
        shares[VALUED ? 32 * h + lane : 0] = total > 0.0f ? share / total : 0.0f;
      }
      const float highest = simd_max(top);
      const float total = simd_sum(sum > 0.0f ? sum * exp(top - highest) : 0.0f);
      if (lane == 0) {
        const float weight = WEIGHTED ? float(weights[row * COUNT + h % COUNT]) : 1.0f;
        tops[h] = total > 0.0f ? highest : 0.0f;
        scales[h] = total > 0.0f ? weight / (total * float(ALL / COUNT)) : 0.0f;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (VALUED) {
      // Strips of lanes share the parts of an element of the output.
      const uint elements = ALL * DV;
      const uint strips = max(1u, lanes / elements);
      for (uint from = 0; from < elements; from += lanes) {
        const uint e = strips > 1 ? here % elements : from + here;
        const uint strip = strips > 1 ? here / elements : 0u;
        float sum = 0.0f;
        if (e < elements && strip < strips) {
          for (uint base = strip; base < parts; base += 8 * strips) {
            float some[8];
            for (int i = 0; i < 8; i++) {
              some[i] = blocks[(min(base + i * strips, parts - 1) * ALL + e / DV) * block + 4 + e % DV];
            }
            for (int i = 0; i < 8; i++) {
              const uint p = base + i * strips;
              if (p < parts) sum += shares[VALUED ? e / DV * 32 + p : 0] * some[i];
            }
          }
        }
        if (strips > 1) {
          joined[here] = sum;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          for (uint s = 1; s < strips && here < elements; s++) sum += joined[s * elements + here];
        }
        if (e < elements && strip == 0) output[row * elements + e] = T(sum);
      }
    }
  }
  for (int h = 0; ATTENDED && JOINS && h < ALL; h++) {
    float next[SLOTS];
    for (int i = 0; i < SLOTS; i++) {
      const uint j = min(begin + i * lanes + here, length - 1);
      next[i] = h + 1 < ALL ? float(logits[(h + 1) * parts * each + j]) : 0.0f;
    }
    const float top = tops[h];
    const float scale = scales[h];
    for (int i = 0; i < SLOTS; i++) {
      received[i] += exp(x[i] - top) * scale;
      x[i] = next[i];
    }
  }
  for (int i = 0; i < SLOTS; i++) {
    const uint j = begin + i * lanes + here;
    if (decays) heavy[i] = product(heavy[i], as_type<float>(uint(DECAY)));
    if (ATTENDED) heavy[i] = heavy[i] + received[i];
    if (STORES && j < length) mass_out[row * length + j] = heavy[i];
    if (RANKS && j < length) {
      const int age = AGED ? max(age_of - position[i], 1) : 0;
      const float importance = importance_of(heavy[i], age, KEEP_LOW, DRAWN ? product(warmth, drawn[i]) : 0.0f);
      const Rank other = rank_of(importance, position[i], now, SINK, RECENT, j);
      if (below(other, mine)) mine = other;
    }
  }
}
if (RANKS) {
  const uint lost = lowest(mine, ranks, here, lanes).slot;
  const bool held = length <= SLOTS * lanes;  // in registers
  for (uint begin = 0; begin < length; begin += SLOTS * lanes) {
    for (int i = 0; i < SLOTS; i++) {
      const uint j = begin + i * lanes + here;
      if (j < length) positions_out[row * length + j] = j == lost ? -1 : (held ? position[i] : int(positions[row * length + j]));
    }
  }
}
