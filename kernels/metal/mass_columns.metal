// Column sums of the softmax of a tile of queries, added to what the slots had: a threadgroup per 32 slots of a row,
// its SIMD groups over the queries. products, logits as in mass_rows.metal.
//
//   mass_out_j = mass_j + sum over the queries of scales * exp(logit_j - tops)
//
// Template: TEMPERED, NOISY (bool).

const uint row = threadgroup_position_in_grid.y;
const uint lane = thread_index_in_simdgroup;
const uint group = simdgroup_index_in_threadgroup;
const uint groups = threads_per_threadgroup.x / 32;
const uint j = threadgroup_position_in_grid.x * 32 + lane;
const uint count = products_shape[2];
const uint queries = products_shape[1] * count;
const uint seen = products_shape[3];
const uint length = positions_shape[1];
threadgroup float part[32 * 32];

float sum = 0.0f;
const int position = j < seen ? positions[row * length + j] : -1;
if (position >= 0) {
  for (uint q = group; q < queries; q += groups) {
    const uint query = row * queries + q;
    float x = products[ulong(query) * seen + j] * scale[0];
    if (position <= until[row * count + q % count] && finite(x)) {
      if (NOISY) x += hashed_gumbel(names[2 * query], names[2 * query + 1], position);
      if (TEMPERED) x = x / tau[row * count + q % count];
      sum += exp(x - tops[query]) * scales[query];
    }
  }
}
part[group * 32 + lane] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (group == 0 && j < length) {
  float total = 0.0f;
  for (uint g = 0; g < groups; g++) total += part[g * 32 + lane];
  mass_out[row * length + j] = mass[row * length + j] + total;
}
