// Column sums of the softmax of a tile of queries, added to what the slots had: a threadgroup per (strip, row), its lanes
// over the slots that the tile's last query can see, C of them each at least. The queries of a strip come one after the
// other, Q at a time, so that every product is read once.
//
// products [N, G, T, n] are q . k of the queries first .. first + T - 1; logit = SCALE * product, or that plus noise,
// divided by heat. mass [N, strips, n]:
//   mass_out_sj = mass_sj + sum over the queries of strip s of weight * softmax_j(logit)
//
// Template: C, Q, SCALE (int, the bits of a float), BEGUN, TEMPERED, NOISY, WEIGHTED (bool).

const uint strip = threadgroup_position_in_grid.x;
const uint strips = threadgroups_per_grid.x;
const uint row = threadgroup_position_in_grid.y;
const uint here = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint lane = here % 32;
const uint group = here / 32;
const uint groups = lanes / 32;
const uint heads = products_shape[1];
const uint count = products_shape[2];
const uint seen = products_shape[3];
const uint length = positions_shape[1];
const uint all = until_shape[1];
const uint queries = heads * count;
const uint before = first[0];
const float scale = as_type<float>(uint(SCALE));
threadgroup float tops[16 * Q];
threadgroup float sums[16 * Q];

// 512 lanes have 128 registers each. With 32 slots the positions are read again for every query, and no more than eight
// loads are under way: a barrier keeps compilers from moving them together.
constexpr bool HELD = C <= 16;
constexpr uint NEVER = 0xFFFFFFFFu;  // no query: what depends on it is not made once and kept in 32 registers

// Free slots and those behind the tile are at 0xFFFFFFFF, later than all queries.
float taken[C];
uint place[HELD ? C : 1];
for (int c = 0; c < C; c++) {
  const uint j = here + c * lanes;
  taken[c] = 0.0f;
  if (HELD) place[HELD ? c : 0] = j < seen ? uint(positions[row * length + j]) : 0xFFFFFFFFu;
}
for (uint base = strip * Q; base < queries; base += strips * Q) {
  float x[Q][C];
  float share[Q];
#pragma unroll
  for (int q = 0; q < Q; q++) {
    const uint query = min(base + q, queries - 1);
    const uint t = before + query % count;
    auto from = products + ulong(row * queries + query) * seen;
    const uint mine = here + (HELD || t != NEVER ? 0u : 1u);
    for (int c = 0; c < C; c++) {
      x[q][c] = from[min(mine + c * lanes, seen - 1)];
      if (!HELD && c % 8 == 7) simdgroup_barrier(mem_flags::mem_none);
    }
    const int limit = until[row * all + t];  // a query that sees nothing has no share
    const float warmth = TEMPERED ? float(heat[row * all + t]) : 1.0f;
    const uint name = 2 * ((row * heads + query / count) * all + t);
    const uint low = NOISY ? uint(names[name]) : 0u;
    const uint high = NOISY ? uint(names[name + 1]) : 0u;
    const bool counts = base + q < queries && limit >= 0;
    share[q] = counts ? (WEIGHTED ? float(weights[row * all + t]) : 1.0f) / float(heads) : 0.0f;
    float top = -INFINITY;
    for (int c = 0; c < C; c++) {
      const uint j = mine + c * lanes;
      const uint position = HELD ? place[HELD ? c : 0] : (j < seen ? uint(positions[row * length + j]) : 0xFFFFFFFFu);
      float logit = x[q][c] * scale;
      logit = position <= uint(limit) && finite(logit) ? logit : -INFINITY;
      if (NOISY) logit += hashed_gumbel(low, high, int(position));
      if (TEMPERED) logit = logit / warmth;
      if (TEMPERED) logit = finite(logit) ? logit : -INFINITY;
      x[q][c] = logit;
      top = max(top, logit);
      if (!HELD && c % 8 == 7) simdgroup_barrier(mem_flags::mem_none);
    }
    top = simd_max(top);
    if (lane == 0) tops[q * 16 + group] = top;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int q = 0; q < Q; q++) {
    const float highest = simd_max(lane < groups ? float(tops[q * 16 + lane]) : -INFINITY);
    const float top = highest > -INFINITY ? highest : 0.0f;
    float sum = 0.0f;
    for (int c = 0; c < C; c++) {
      x[q][c] = exp(x[q][c] - top);
      sum += x[q][c];
    }
    sum = simd_sum(sum);
    if (lane == 0) sums[q * 16 + group] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int q = 0; q < Q; q++) {
    const float total = simd_sum(lane < groups ? float(sums[q * 16 + lane]) : 0.0f);
    const float part = total > 0.0f ? share[q] / total : 0.0f;
    for (int c = 0; c < C; c++) taken[c] += part * x[q][c];
  }
}
for (int c = 0; c < C; c++) {
  const uint j = here + c * lanes;
  const uint at = (row * strips + strip) * length + j;
  if (j < length) mass_out[at] = (BEGUN ? float(mass[at]) : 0.0f) + taken[c];
  if (!HELD && c % 8 == 7) simdgroup_barrier(mem_flags::mem_none);
}
for (uint j = here + C * lanes; j < length; j += lanes) {
  const uint at = (row * strips + strip) * length + j;
  mass_out[at] = BEGUN ? float(mass[at]) : 0.0f;
}
