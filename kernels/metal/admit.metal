// One threadgroup per row: the first free slot is given to the token that arrives.
// Template: COLUMNS, how many of the columns there are (0, 1 or 2).

const uint row = threadgroup_position_in_grid.x;
const uint lane = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint length = positions_shape[1];
const int now = seen[row];
threadgroup uint ranks[96];

Rank mine = last_rank();
for (uint j = lane; j < length; j += lanes) {
  const int position = positions[row * length + j];
  const Rank other = Rank{position < 0 ? 0u : 1u, uint(position), j};
  if (below(other, mine)) mine = other;
}
const uint given = lowest(mine, ranks, lane, lanes).slot;
for (uint j = lane; j < length; j += lanes) {
  const uint at = row * length + j;
  positions_out[at] = j == given ? now : positions[at];
  if (COLUMNS > 0) first_out[at] = j == given ? first_fresh[row] : first[at];
  if (COLUMNS > 1) second_out[at] = j == given ? second_fresh[row] : second[at];
}
if (lane == 0) {
  slot[row] = int(given);
  seen_out[row] = now + 1;
}
