// The rank of every slot among the live ones of its row, by position: a threadgroup per 256 places of a row.
//
// order holds the slots of a row in the order of their positions, free ones first; a free one's rank is negative.

const uint row = threadgroup_position_in_grid.x;
const uint place = threadgroup_position_in_grid.y * threads_per_threadgroup.x + thread_position_in_threadgroup.x;
const uint length = positions_shape[1];
const uint start = row * length;

if (place < length) {
  // The first live one, by bisection.
  uint low = 0u;
  uint high = length;
  while (low < high) {
    const uint middle = (low + high) / 2;
    if (positions[start + order[start + middle]] < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  rank[start + order[start + place]] = int(place) - int(low);
}
