// Attention of a few queries over one part of a row's slots: a threadgroup per (row, part, heads). LANES lanes of a SIMD
// group share a slot, so that it takes 32 / LANES slots in a load, U loads at once. evict_step.metal joins the parts.
// Where CARRIES, keys and values are copied as well, with those of a token that arrives in the first free slot.
//
// scratch [N, parts, ..] holds for each row first, for each part and head,
//   the maximum of its logits; the sum of exp(logit - maximum); the same two of what its mass is made of
//   sum of exp(logit - maximum) v, [DV], where VALUED
// and then, where RECEIVES, for each head,
//   [parts * each] x_j = scale q_h . k_j, or (that + noise) / heat where TEMPERED; -inf where slot j is not visible to
//   head h or the product is not finite
//
// Head h = g * COUNT + t is query t of query head g. Template: T (type), D, DV, HEADS, COUNT, UNIT (a part is so
// many slots, or a multiple), LANES, WIDE (elements of one load), SCALE (int, the bits of a float), VALUED, RECEIVES
// (whether the mass is asked for), LIMITED (by `until`), GUARDED (a padded arrival sees nothing), TEMPERED, NOISY, RECIPE
// (bool): heat and names are made here, for one query; CARRIES; APART (int, dimensions of values that are copied but not
// attended to, or 0), PACK (int, elements of a load of them).

constexpr int U = HEADS <= 2 ? 4 : 2;  // registers
constexpr int ROWS = 32 / LANES;
constexpr int C = (D + LANES * WIDE - 1) / (LANES * WIDE);
constexpr int CV = VALUED ? (DV + LANES * WIDE - 1) / (LANES * WIDE) : 1;
constexpr int PAIRS = TEMPERED ? (U * HEADS + LANES - 1) / LANES : 1;  // of slot and head, that a lane tempers
const uint row = threadgroup_position_in_grid.x;
const uint part = threadgroup_position_in_grid.y;
const uint parts = threadgroups_per_grid.y;
const uint first = threadgroup_position_in_grid.z * HEADS;
const uint lane = thread_index_in_simdgroup;
const uint place = lane % LANES;  // among those of a slot
const uint line = lane / LANES;
const uint group = simdgroup_index_in_threadgroup;
const uint groups = threads_per_threadgroup.x / 32;
const uint length = positions_shape[1];
const uint size = keys_shape[1];
const uint count = COUNT;
const uint heads = queries_shape[1] * count;
const float scale = as_type<float>(uint(SCALE));
const uint each = ((length + UNIT - 1) / UNIT + parts - 1) / parts * UNIT;
const uint begin = part * each;
const uint end = min(begin + each, length);
const uint block = 4 + (VALUED ? DV : 0);
auto blocks = scratch + ulong(row) * parts * heads * (block + (RECEIVES ? each : 0u));
auto mine = blocks + part * heads * block;
auto logits = blocks + parts * heads * block;
threadgroup float group_tops[2 * 8 * HEADS];
threadgroup float group_sums[2 * 8 * HEADS];
threadgroup float group_outputs[8 * DV];
threadgroup uint ranks[96];

const uint given = CARRIES ? first_free(positions + row * length, length, ranks, group * 32 + lane, groups * 32) : length;
const bool carries = CARRIES && first == 0;  // once for all heads
if (APART > 0 && carries) {
  const ulong at = (ulong(row) * length + begin) * APART;
  copy_packed<T, PACK>(values + at, values_out + at, (end - begin) * APART, group * 32 + lane, groups * 32);
  threadgroup_barrier(mem_flags::mem_device);
  for (uint d = group * 32 + lane; d < APART && given >= begin && given < end; d += groups * 32) {
    values_out[(ulong(row) * length + given) * APART + d] = fresh_value[row * APART + d];
  }
}

float q[HEADS][C][WIDE];
float out[HEADS][CV][WIDE];
float top[HEADS];
float total[HEADS];
int limit[HEADS];
#pragma unroll
for (int h = 0; h < HEADS; h++) {
  const uint head = min(first + h, heads - 1);
  for (int c = 0; c < C; c++) {
    for (int w = 0; w < WIDE; w++) {
      const uint d = (c * LANES + place) * WIDE + w;
      q[h][c][w] = d < D ? float(queries[(row * heads + head) * D + d]) * scale : 0.0f;
    }
  }
  for (int c = 0; c < CV; c++) {
    for (int w = 0; w < WIDE; w++) out[h][c][w] = 0.0f;
  }
  top[h] = -INFINITY;
  total[h] = 0.0f;
  limit[h] = LIMITED ? int(until[row * count + head % count]) : 0x7FFFFFFF;
  if (GUARDED && arrived[row] < 0) limit[h] = -1;
}
// Pair h * U + u is slot u of a load and head h.
float warm_top[PAIRS];
float warm_total[PAIRS];
uint low[PAIRS];
uint high[PAIRS];
float warmth[PAIRS];
for (int n = 0; TEMPERED && n < PAIRS; n++) {
  const uint head = min(first + (n * LANES + place) / U, heads - 1);
  warm_top[n] = -INFINITY;
  warm_total[n] = 0.0f;
  low[n] = 0u;
  high[n] = 0u;
  if (NOISY && RECIPE) {
    const ulong name = named(named(named(name_of(seed), streams[row]), head), uint(max(int(newest[row]) - 1, 0)));
    low[n] = uint(name);
    high[n] = uint(name >> 32);
  } else if (NOISY) {
    low[n] = names[2 * (row * heads + head)];
    high[n] = names[2 * (row * heads + head) + 1];
  }
  if (RECIPE) {
    const float rise = FALLS ? -as_type<float>(uint(RISE)) : as_type<float>(uint(RISE));
    warmth[n] = temperature(as_type<float>(uint(FIRST)), rise, STEPS, START, int(newest[row]) - 1);
  } else {
    warmth[n] = float(heat[row * count + head % count]);
  }
}

for (uint base = begin + group * ROWS * U; base < end; base += groups * ROWS * U) {
  const uint j = base + line;  // and ROWS further on, U times
  Packed<T, WIDE> k[U][C];
  Packed<T, WIDE> v[U][CV];
  int position[U];
  for (int u = 0; u < U; u++) {
    const uint slot = min(j + u * ROWS, end - 1);
    auto from = either(slot == given, fresh_key + row * D, keys + (ulong(row) * size + slot) * D);
    for (int c = 0; c < C; c++) k[u][c] = load_packed<T, WIDE, D>(from, (c * LANES + place) * WIDE);
    position[u] = j + u * ROWS < end ? (slot == given ? int(newest[row]) - 1 : int(positions[row * length + slot])) : -1;
  }
  if (VALUED) {
    for (int u = 0; u < U; u++) {
      const uint slot = min(j + u * ROWS, end - 1);
      auto from = either(slot == given, fresh_value + row * DV, values + (ulong(row) * size + slot) * DV);
      for (int c = 0; c < CV; c++) v[u][c] = load_packed<T, WIDE, DV>(from, (c * LANES + place) * WIDE);
    }
  }
  for (int u = 0; u < U && carries; u++) {
    if (j + u * ROWS < end) {
      const ulong slot = ulong(row) * length + j + u * ROWS;
      for (int c = 0; c < C; c++) store_packed<T, WIDE, D>(keys_out + slot * D, (c * LANES + place) * WIDE, k[u][c]);
      for (int c = 0; VALUED && c < CV; c++) {
        store_packed<T, WIDE, DV>(values_out + slot * DV, (c * LANES + place) * WIDE, v[u][c]);
      }
    }
  }
  float x[U][HEADS];
  for (int u = 0; u < U; u++) {
    for (int h = 0; h < HEADS; h++) {
      float dot = 0.0f;
      for (int c = 0; c < C; c++) {
        for (int w = 0; w < WIDE; w++) dot += q[h][c][w] * float(k[u][c].at[w]);
      }
      for (int m = LANES / 2; m > 0; m /= 2) dot += simd_shuffle_xor(dot, m);
      const bool visible = position[u] >= 0 && position[u] <= limit[h] && finite(dot);
      x[u][h] = visible ? dot : -INFINITY;
    }
  }
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    float highest = top[h];
    for (int u = 0; u < U; u++) highest = max(highest, x[u][h]);
    if (highest > -INFINITY) {
      const float kept = exp(top[h] - highest);
      float sum = total[h] * kept;
      for (int c = 0; c < CV; c++) {
        for (int w = 0; w < WIDE; w++) out[h][c][w] *= kept;
      }
      for (int u = 0; u < U; u++) {
        const float weight = exp(x[u][h] - highest);
        sum += weight;
        if (VALUED && weight > 0.0f) {
          for (int c = 0; c < CV; c++) {
            for (int w = 0; w < WIDE; w++) out[h][c][w] += weight * float(v[u][c].at[w]);
          }
        }
      }
      total[h] = sum;
      top[h] = highest;
    }
    for (int u = 0; RECEIVES && !TEMPERED && u < U; u++) {
      const uint slot = j + u * ROWS;
      if (place == uint(u % LANES) && slot < end && first + h < heads) {
        logits[(first + h) * parts * each + slot] = x[u][h];
      }
    }
  }
#pragma unroll
  for (int n = 0; TEMPERED && n < PAIRS; n++) {
    const uint pair = n * LANES + place;
    float warm = -INFINITY;
    int born = 0;
    for (int u = 0; u < U; u++) {
      born = pair % U == uint(u) ? position[u] : born;
      for (int h = 0; h < HEADS; h++) warm = pair == uint(h * U + u) ? x[u][h] : warm;
    }
    warm = (warm + (NOISY ? hashed_gumbel(low[n], high[n], born) : 0.0f)) / warmth[n];
    warm = finite(warm) ? warm : -INFINITY;
    const float highest = max(warm_top[n], warm);
    if (highest > -INFINITY) {
      warm_total[n] = warm_total[n] * exp(warm_top[n] - highest) + exp(warm - highest);
      warm_top[n] = highest;
    }
    const uint head = first + pair / U, slot = j + pair % U * ROWS;
    if (RECEIVES && pair < uint(U * HEADS) && slot < end && head < heads) logits[head * parts * each + slot] = warm;
  }
}

// The lines' parts, joined head by head, then those of the SIMD groups.
#pragma unroll
for (int h = 0; h < HEADS; h++) {
  float highest = top[h];
  for (int m = LANES; m < 32; m *= 2) highest = max(highest, simd_shuffle_xor(highest, m));
  float kept = total[h] > 0.0f ? exp(top[h] - highest) : 0.0f;
  total[h] *= kept;
  for (int m = LANES; m < 32; m *= 2) total[h] += simd_shuffle_xor(total[h], m);
  top[h] = highest;
  if (VALUED) {
    for (int c = 0; c < CV; c++) {
      for (int w = 0; w < WIDE; w++) {
        float sum = out[h][c][w] * kept;
        for (int m = LANES; m < 32; m *= 2) sum += simd_shuffle_xor(sum, m);
        out[h][c][w] = sum;
      }
    }
  }
  float most = -INFINITY;
  float sum = 0.0f;
  for (int n = 0; TEMPERED && n < PAIRS; n++) {
    if ((n * LANES + place) / U == uint(h)) most = max(most, warm_top[n]);
  }
  if (TEMPERED) most = simd_max(most);
  for (int n = 0; TEMPERED && n < PAIRS; n++) {
    if ((n * LANES + place) / U == uint(h) && warm_total[n] > 0.0f) sum += warm_total[n] * exp(warm_top[n] - most);
  }
  if (TEMPERED) sum = simd_sum(sum);
  if (lane == 0) {
    group_tops[group * HEADS + h] = top[h];
    group_sums[group * HEADS + h] = total[h];
    group_tops[(8 + group) * HEADS + h] = TEMPERED ? most : top[h];
    group_sums[(8 + group) * HEADS + h] = TEMPERED ? sum : total[h];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
for (int h = 0; h < HEADS; h++) {
  if (first + h < heads) {
    float highest = -INFINITY;
    for (uint g = 0; g < groups; g++) highest = max(highest, group_tops[g * HEADS + h]);
    if (group == 0 && lane < 2) {
      // Lane 1 does so for the mass.
      float most = -INFINITY;
      for (uint g = 8 * lane; g < 8 * lane + groups; g++) most = max(most, group_tops[g * HEADS + h]);
      float sum = 0.0f;
      for (uint g = 8 * lane; g < 8 * lane + groups; g++) {
        const float one = group_sums[g * HEADS + h];
        if (one > 0.0f) sum += one * exp(group_tops[g * HEADS + h] - most);
      }
      mine[(first + h) * block + 2 * lane] = most;
      mine[(first + h) * block + 2 * lane + 1] = sum;
    }
    if (VALUED) {
      const float kept = total[h] > 0.0f ? exp(top[h] - highest) : 0.0f;
      for (int c = 0; c < CV; c++) {
        for (int w = 0; w < WIDE; w++) {
          const uint d = (c * LANES + place) * WIDE + w;
          if (line == 0 && d < DV) group_outputs[group * DV + d] = out[h][c][w] * kept;
        }
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
