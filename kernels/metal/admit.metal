// One threadgroup per row: the first free slot is given to the token that arrives, and its entries of two columns.
// Template: FIRST, SECOND (int): what the arrival's entry is. 0: there is no such column; 1: given; 2: zero; 3: the norm
// of its key of DIMS dimensions; 4: a Gumbel draw addressed by (seed, stream, position). TURNED (bool): it comes rotated at
// the number of tokens that are there.

const uint row = threadgroup_position_in_grid.x;
const uint lane = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint length = positions_shape[1];
const int now = seen[row];
threadgroup uint ranks[96];
threadgroup float sums[32];

Rank mine = last_rank();
float live = 0.0f;
for (uint j = lane; j < length; j += lanes) {
  const int position = positions[row * length + j];
  if (position >= 0) live = live + 1.0f;
  const Rank other = Rank{position < 0 ? 0u : 1u, uint(position), j};
  if (below(other, mine)) mine = other;
}
const uint given = lowest(mine, ranks, lane, lanes).slot;
const int there = TURNED ? int(sum_of(live, sums, lane, lanes)) : 0;
float norm = 0.0f;
float drawn = 0.0f;
if (FIRST == 3) {
  norm = norm_of(keys, row * DIMS, DIMS, lane % 32);
}
if (SECOND == 4) {
  const ulong name = named(name_of(seed), streams[row]);
  drawn = hashed_gumbel(uint(name), uint(name >> 32), now);
}
for (uint j = lane; j < length; j += lanes) {
  const uint at = row * length + j;
  const bool here = j == given;
  positions_out[at] = here ? now : positions[at];
  if (TURNED) rotations_out[at] = here ? there : rotations[at];
  if (FIRST > 0) {
    float value = 0.0f;
    if (FIRST == 1) value = first_fresh[row];
    if (FIRST == 3) value = norm;
    first_out[at] = here ? value : first[at];
  }
  if (SECOND > 0) {
    float value = 0.0f;
    if (SECOND == 1) value = second_fresh[row];
    if (SECOND == 4) value = drawn;
    second_out[at] = here ? value : second[at];
  }
}
if (lane == 0) {
  slot[row] = int(given);
  seen_out[row] = now + 1;
}
