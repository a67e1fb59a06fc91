// A SIMD group per key: its Euclidean norm.

const uint key = threadgroup_position_in_grid.x * (threads_per_threadgroup.x / 32) + simdgroup_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint dims = keys_shape[1];
if (key < uint(keys_shape[0])) {
  const float norm = norm_of(keys, ulong(key) * dims, dims, lane);
  if (lane == 0) norms[key] = norm;
}
