// One threadgroup per row: the window with one query's attention, what every slot received from it, pooled in time, and
// the slot that loses, whose position becomes -1.
//
//   window_out[t, j] = attention_j where t is the query's row of the ring, 0 for the slot that it came to, else window[t, j]
//   received_j = mean of window_out[t, j] over t
//   importance_j = mean, or maximum where HIGHEST, of received over the past slots at most KERNEL / 2 places away in time
//
// order holds each row's slots in the order of their positions, free ones first. Template: KERNEL, SINK, RECENT (int),
// HIGHEST (bool).

const uint row = threadgroup_position_in_grid.x;
const uint lane = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint length = positions_shape[1];
const uint size = window_shape[1];
const uint start = row * length;
const int now = seen[row];
const int came = arrived[row];
const uint fresh = came >= 0 ? uint(now - 1) % size : size;
threadgroup uint ranks[96];

Rank mine = last_rank();
for (uint j = lane; j < length; j += lanes) {
  const float heavy = attention[start + j];
  float sum = 0.0f;
  for (uint t = 0; t < size; t++) {
    const ulong at = (ulong(row) * size + t) * length + j;
    const float known = int(j) == came ? 0.0f : float(window[at]);
    const float x = t == fresh ? heavy : known;
    window_out[at] = x;
    sum = sum + x;
  }
  sum = sum / float(size);
  received[start + j] = sum;
  if (KERNEL == 1) {
    const Rank other = rank_of(sum, positions[start + j], now, SINK, RECENT, j);
    if (below(other, mine)) mine = other;
  }
}
if (KERNEL > 1) {
  threadgroup_barrier(mem_flags::mem_device);
  for (uint r = lane; r < length; r += lanes) {
    const uint half_way = KERNEL / 2;
    const uint first = r > half_way ? r - half_way : 0u;
    const uint last = min(r + half_way, length - 1);
    float sum = 0.0f;
    float highest = -INFINITY;
    float count = 0.0f;
    for (uint i = first; i <= last; i++) {
      const uint slot = order[start + i];
      const int position = positions[start + slot];
      if (position >= 0 && position < now - RECENT) {
        const float x = received[start + slot];
        sum = sum + x;
        // As a maximum is taken elsewhere: NaN if one is NaN.
        highest = isnan(x) || isnan(highest) ? NAN : max(highest, x);
        count = count + 1.0f;
      }
    }
    const uint j = order[start + r];
    const float importance = HIGHEST ? highest : sum / max(count, 1.0f);
    const Rank other = rank_of(importance, positions[start + j], now, SINK, RECENT, j);
    if (below(other, mine)) mine = other;
  }
}
const uint lost = lowest(mine, ranks, lane, lanes).slot;
for (uint j = lane; j < length; j += lanes) {
  positions_out[start + j] = j == lost ? -1 : positions[start + j];
}
