// Column sums of the softmax of a tile of queries, added to what the slots had: a threadgroup per 128 slots of a row,
// its SIMD groups over the queries, four slots per lane. products, logits, stats as in mass_rows.metal.
//
//   mass_out_j = mass_j + sum over the queries of stats[1] * exp(logit_j - stats[0])
//
// Template: TEMPERED, NOISY (bool).

constexpr int U = 4;
const uint row = threadgroup_position_in_grid.y;
const uint lane = thread_index_in_simdgroup;
const uint group = simdgroup_index_in_threadgroup;
const uint groups = threads_per_threadgroup.x / 32;
const uint first = threadgroup_position_in_grid.x * (32 * U) + lane;
const uint heads = products_shape[1];
const uint count = products_shape[2];
const uint seen = products_shape[3];
const uint length = positions_shape[1];
const float unit = scale[0];
threadgroup float part[32 * 32];

float sum[U];
int place[U];
for (int u = 0; u < U; u++) {
  const uint j = first + 32 * u;
  sum[u] = 0.0f;
  place[u] = j < seen ? positions[row * length + j] : -1;
}
if (first - lane < seen) {
  for (uint head = 0; head < heads; head++) {
    for (uint t = group; t < count; t += groups) {
      const uint query = (row * heads + head) * count + t;
      const int limit = until[row * count + t];
      const float top = stats[2 * query];
      const float share = stats[2 * query + 1];
      const float warmth = TEMPERED ? float(heat[row * count + t]) : 1.0f;
      auto logits = products + ulong(query) * seen;
      for (int u = 0; u < U; u++) {
        const bool visible = place[u] >= 0 && place[u] <= limit;
        float x = visible ? logits[first + 32 * u] * unit : -INFINITY;
        if (!finite(x)) x = -INFINITY;
        if (NOISY) x += hashed_gumbel(names[2 * query], names[2 * query + 1], place[u]);
        if (TEMPERED) x = x / warmth;
        sum[u] += share > 0.0f ? share * exp(x - top) : 0.0f;
      }
    }
  }
}
for (int u = 0; u < U; u++) {
  part[group * 32 + lane] = sum[u];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint j = first + 32 * u;
  if (group == 0 && j < length) {
    float total = 0.0f;
    for (uint g = 0; g < groups; g++) total += part[g * 32 + lane];
    mass_out[row * length + j] = mass[row * length + j] + total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
