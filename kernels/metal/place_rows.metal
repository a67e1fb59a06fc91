// Keys and values with one row of each replaced: lanes over the elements of a row of streams.
// Template: D, DV (int).

const uint row = threadgroup_position_in_grid.y;
const uint lane = threadgroup_position_in_grid.x * threads_per_threadgroup.x + thread_position_in_threadgroup.x;
const uint lanes = threadgroups_per_grid.x * threads_per_threadgroup.x;
const uint size = keys_shape[1];
const uint given = uint(slot[row]);

for (uint i = lane; i < size * D; i += lanes) {
  keys_out[ulong(row) * size * D + i] = i / D == given ? fresh_keys[row * D + i % D] : keys[ulong(row) * size * D + i];
}
for (uint i = lane; i < size * DV; i += lanes) {
  values_out[ulong(row) * size * DV + i] =
      i / DV == given ? fresh_values[row * DV + i % DV] : values[ulong(row) * size * DV + i];
}
