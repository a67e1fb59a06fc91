// Attention of a few queries over one part of a row's slots: a threadgroup per (row, part, heads), a SIMD group per
// four slots at a time, its lanes over the dimensions. attend_combine.metal joins the parts.
//
// scratch [N, parts, ..] holds for each head of a part, one after the other:
//   top, the maximum of its logits; the sum of exp(logit - top); both of the tempered logits, (logit + noise) / heat
//   sum of exp(logit - top) v, [DV], where VALUED
//   logit_j = scale q_h . k_j where slot j is visible to head h and this is finite, else -inf, where RECEIVES
//
// Head h = g * COUNT + t is query t of query head g. Template: T (type), D, DV, HEADS, COUNT, SCALE (int, the bits of
// a float), VALUED, RECEIVES (whether the mass is asked for), LIMITED (by `until`),
// GUARDED (a padded arrival sees nothing), TEMPERED, NOISY, RECIPE (bool): heat and names are made here, for one query.

constexpr int E = (D + 31) / 32;
constexpr int EV = (DV + 31) / 32;
constexpr int U = 4;
const uint row = threadgroup_position_in_grid.x;
const uint part = threadgroup_position_in_grid.y;
const uint parts = threadgroups_per_grid.y;
const uint first = threadgroup_position_in_grid.z * HEADS;
const uint lane = thread_index_in_simdgroup;
const uint group = simdgroup_index_in_threadgroup;
const uint groups = threads_per_threadgroup.x / 32;
const uint length = positions_shape[1];
const uint size = keys_shape[1];
const uint heads = queries_shape[1];
const uint count = COUNT;
const float scale = as_type<float>(uint(SCALE));
const uint each = (length + parts - 1) / parts;
const uint begin = part * each;
const uint end = min(begin + each, length);
const uint block = 4 + (VALUED ? DV : 0) + (RECEIVES ? each : 0u);
auto mine = scratch + ulong(row * parts + part) * heads * block;
threadgroup float group_tops[8 * HEADS];
threadgroup float group_sums[8 * HEADS];
threadgroup float group_outputs[8 * DV];

float q[HEADS][E];
float out[HEADS][EV];
float top[HEADS];
float total[HEADS];
float warm_top[HEADS];
float warm_total[HEADS];
int limit[HEADS];
uint low[HEADS];
uint high[HEADS];
float warmth[HEADS];
for (int h = 0; h < HEADS; h++) {
  const uint head = min(first + h, heads - 1);
  for (int e = 0; e < E; e++) {
    const uint d = lane * E + e;
    q[h][e] = d < D ? float(queries[(row * heads + head) * D + d]) * scale : 0.0f;
  }
  for (int e = 0; e < EV; e++) out[h][e] = 0.0f;
  top[h] = -INFINITY;
  total[h] = 0.0f;
  warm_top[h] = -INFINITY;
  warm_total[h] = 0.0f;
  low[h] = 0u;
  high[h] = 0u;
  if (NOISY && RECIPE) {
    const ulong name = named(named(named(name_of(seed), streams[row]), head), uint(max(int(newest[row]) - 1, 0)));
    low[h] = uint(name);
    high[h] = uint(name >> 32);
  } else if (NOISY) {
    low[h] = names[2 * (row * heads + head)];
    high[h] = names[2 * (row * heads + head) + 1];
  }
  warmth[h] = 1.0f;
  if (TEMPERED) warmth[h] = RECIPE ? temperature(as_type<float>(uint(FIRST)), FALLS ? -as_type<float>(uint(RISE)) : as_type<float>(uint(RISE)), STEPS, START, int(newest[row]) - 1) : float(heat[row * count + head % count]);
  limit[h] = LIMITED ? int(until[row * count + head % count]) : 0x7FFFFFFF;
  if (GUARDED && arrived[row] < 0) limit[h] = -1;
}

for (uint j = begin + group * U; j < end; j += groups * U) {
  float k[U][E];
  int place[U];
  for (int u = 0; u < U; u++) {
    const uint slot = min(j + u, end - 1);
    auto from = keys + ((ulong(row) * size + slot) * D + lane * E);
    if (D % 32 == 0) {
      load_floats<E>(from, k[u]);
    } else {
      for (int e = 0; e < E; e++) k[u][e] = lane * E + e < D ? float(from[e]) : 0.0f;
    }
    place[u] = j + u < end ? positions[row * length + slot] : -1;
  }
  float v[U][EV];
  if (VALUED) {
    for (int u = 0; u < U; u++) {
      const uint slot = min(j + u, end - 1);
      auto from = values + ((ulong(row) * size + slot) * DV + lane * EV);
      if (DV % 32 == 0) {
        load_floats<EV>(from, v[u]);
      } else {
        for (int e = 0; e < EV; e++) v[u][e] = lane * EV + e < DV ? float(from[e]) : 0.0f;
      }
    }
  }
  float x[U][HEADS];
  for (int u = 0; u < U; u++) {
    for (int h = 0; h < HEADS; h++) {
      float dot = 0.0f;
      for (int e = 0; e < E; e++) dot += q[h][e] * k[u][e];
      x[u][h] = simd_sum(dot);
      const bool visible = place[u] >= 0 && place[u] <= limit[h] && finite(x[u][h]);
      x[u][h] = visible ? x[u][h] : -INFINITY;
      if (RECEIVES && lane == uint(u) && j + u < end && first + h < heads) {
        mine[(first + h) * block + 4 + (VALUED ? DV : 0) + j + u - begin] = x[u][h];
      }
    }
  }
  if (TEMPERED) {
    float drawn = 0.0f;
    for (int h = 0; h < HEADS; h++) {
      // Each lane draws for one pair of slot and head.
      if (NOISY && lane / U == uint(h)) {
        drawn = hashed_gumbel(low[h], high[h], positions[row * length + min(j + lane % U, end - 1)]);
      }
    }
    for (int h = 0; h < HEADS; h++) {
      float warm[U];
      float highest = warm_top[h];
      for (int u = 0; u < U; u++) {
        const float zeta = NOISY ? simd_shuffle(drawn, h * U + u) : 0.0f;
        warm[u] = (x[u][h] + zeta) / warmth[h];
        highest = max(highest, warm[u]);
      }
      if (highest > -INFINITY) {
        float sum = warm_total[h] * exp(warm_top[h] - highest);
        for (int u = 0; u < U; u++) sum += exp(warm[u] - highest);
        warm_total[h] = sum;
        warm_top[h] = highest;
      }
    }
  }
  for (int h = 0; h < HEADS; h++) {
    float highest = top[h];
    for (int u = 0; u < U; u++) highest = max(highest, x[u][h]);
    if (highest > -INFINITY) {
      const float kept = exp(top[h] - highest);
      float sum = total[h] * kept;
      for (int e = 0; e < EV; e++) out[h][e] *= kept;
      for (int u = 0; u < U; u++) {
        const float weight = exp(x[u][h] - highest);
        sum += weight;
        if (VALUED && weight > 0.0f) {
          for (int e = 0; e < EV; e++) out[h][e] += weight * v[u][e];
        }
      }
      total[h] = sum;
      top[h] = highest;
    }
  }
}

// The SIMD groups' parts, joined head by head.
if (TEMPERED) {
  for (int h = 0; h < HEADS; h++) {
    if (lane == 0) {
      group_tops[group * HEADS + h] = warm_top[h];
      group_sums[group * HEADS + h] = warm_total[h];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (group == 0 && lane < HEADS && first + lane < heads) {
    float highest = -INFINITY;
    for (uint g = 0; g < groups; g++) highest = max(highest, group_tops[g * HEADS + lane]);
    float sum = 0.0f;
    for (uint g = 0; g < groups; g++) {
      const float one = group_sums[g * HEADS + lane];
      if (one > 0.0f) sum += one * exp(group_tops[g * HEADS + lane] - highest);
    }
    mine[(first + lane) * block + 2] = highest;
    mine[(first + lane) * block + 3] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
for (int h = 0; h < HEADS; h++) {
  if (lane == 0) {
    group_tops[group * HEADS + h] = top[h];
    group_sums[group * HEADS + h] = total[h];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int h = 0; h < HEADS; h++) {
  if (first + h < heads) {
    float highest = -INFINITY;
    for (uint g = 0; g < groups; g++) highest = max(highest, group_tops[g * HEADS + h]);
    float sum = 0.0f;
    for (uint g = 0; g < groups; g++) {
      const float one = group_sums[g * HEADS + h];
      if (one > 0.0f) sum += one * exp(group_tops[g * HEADS + h] - highest);
    }
    if (group == 0 && lane == 0) {
      mine[(first + h) * block] = highest;
      mine[(first + h) * block + 1] = sum;
    }
    if (VALUED) {
      const float kept = total[h] > 0.0f ? exp(top[h] - highest) : 0.0f;
      for (int e = 0; e < EV; e++) {
        if (lane * EV + e < DV) group_outputs[group * DV + lane * EV + e] = out[h][e] * kept;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint d = group * 32 + lane; d < DV; d += groups * 32) {
        float joined = 0.0f;
        for (uint g = 0; g < groups; g++) joined += group_outputs[g * DV + d];
        mine[(first + h) * block + 4 + d] = joined;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}
