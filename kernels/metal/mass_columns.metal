// Column sums of the softmax of a tile of queries, added to what the slots had: a threadgroup per 128 slots of a row,
// its SIMD groups over the queries, four slots per lane. products, logits, stats as in mass_rows.metal.
//
//   mass_out_j = mass_j + sum over the queries of stats[1] * exp(logit_j - stats[0])
//
// Template: TEMPERED, NOISY (bool).

constexpr int U = 4;
constexpr int V = 2;
const uint row = threadgroup_position_in_grid.y;
const uint lane = thread_index_in_simdgroup;
const uint group = simdgroup_index_in_threadgroup;
const uint groups = threads_per_threadgroup.x / 32;
const uint column = threadgroup_position_in_grid.x * (32 * U) + lane;
const uint heads = products_shape[1];
const uint count = products_shape[2];
const uint seen = products_shape[3];
const uint length = positions_shape[1];
const uint all = until_shape[1];
const uint before = first[0];
const float unit = scale[0];
threadgroup float part[32 * 32];

float sum[U];
int place[U];
for (int u = 0; u < U; u++) {
  const uint j = column + 32 * u;
  sum[u] = 0.0f;
  place[u] = j < seen ? positions[row * length + j] : -1;
}
if (column - lane < seen) {
  for (uint head = 0; head < heads; head++) {
    for (uint t = group; t < count; t += V * groups) {
      float x[V][U];
      float top[V];
      float share[V];
      int limit[V];
      for (int v = 0; v < V; v++) {
        const uint mine = min(t + v * groups, count - 1);
        const uint query = (row * heads + head) * count + mine;
        auto logits = products + ulong(query) * seen;
        for (int u = 0; u < U; u++) x[v][u] = logits[min(column + 32 * u, seen - 1)];
        top[v] = stats[2 * query];
        share[v] = t + v * groups < count ? float(stats[2 * query + 1]) : 0.0f;
        limit[v] = until[row * all + before + mine];
      }
      for (int v = 0; v < V; v++) {
        const uint mine = before + min(t + v * groups, count - 1);
        const uint name = 2 * ((row * heads + head) * all + mine);
        for (int u = 0; u < U; u++) {
          float logit = x[v][u] * unit;
          logit = place[u] >= 0 && place[u] <= limit[v] && finite(logit) ? logit : -INFINITY;
          if (NOISY) logit += hashed_gumbel(names[name], names[name + 1], place[u]);
          if (TEMPERED) logit = logit / float(heat[row * all + mine]);
          sum[u] += share[v] > 0.0f ? share[v] * exp(logit - top[v]) : 0.0f;
        }
      }
    }
  }
}
for (int u = 0; u < U; u++) {
  part[group * 32 + lane] = sum[u];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint j = column + 32 * u;
  if (group == 0 && j < length) {
    float total = 0.0f;
    for (uint g = 0; g < groups; g++) total += part[g * 32 + lane];
    mass_out[row * length + j] = mass[row * length + j] + total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
