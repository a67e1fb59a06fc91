// One threadgroup per row: the slot of the lowest rank. Template: SINK, RECENT (int).

const uint row = threadgroup_position_in_grid.x;
const uint lane = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint length = positions_shape[1];
const int now = seen[row];
threadgroup uint ranks[96];

Rank mine = last_rank();
for (uint j = lane; j < length; j += lanes) {
  const uint at = row * length + j;
  const Rank other = rank_of(importance[at], positions[at], now, SINK, RECENT, j);
  if (below(other, mine)) mine = other;
}
const Rank best = lowest(mine, ranks, lane, lanes);
if (lane == 0) slot[row] = int(best.slot);
