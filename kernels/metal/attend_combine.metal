// The parts of attend.metal, joined, a threadgroup per row: the output of every head, and what each slot receives.
//
//   attention_j = sum_h weight_t exp(logits[h, j] - top_h) / total_h / query heads   (of the tempered logits, if any)
//
// scratch as in attend.metal. Template: T (type), DV, COUNT, ALL (int, heads), VALUED, RECEIVES, TEMPERED, NOISY, RECIPE, WEIGHTED (bool).

const uint row = threadgroup_position_in_grid.x;
const uint here = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint lane = here % 32;
const uint length = positions_shape[1];
const uint heads = ALL;
const uint parts = scratch_shape[1];
const uint count = COUNT;
const uint each = (length + parts - 1) / parts;
const uint block = 4 + (VALUED ? DV : 0) + (RECEIVES ? each : 0u);
auto blocks = scratch + ulong(row) * parts * heads * block;
threadgroup float plain_top[128];
threadgroup float plain_total[128];
threadgroup float mass_top[128];
threadgroup float mass_scale[128];
threadgroup float warmth[128];
threadgroup uint low[128];
threadgroup uint high[128];
threadgroup float joined[1024];

for (uint h = here / 32; h < heads; h += lanes / 32) {
  const uint at = (min(lane, parts - 1) * heads + h) * block;
  float top = lane < parts ? float(blocks[at]) : -INFINITY;
  float total = lane < parts ? float(blocks[at + 1]) : 0.0f;
  float highest = simd_max(top);
  total = simd_sum(total > 0.0f ? total * exp(top - highest) : 0.0f);
  if (lane == 0) {
    plain_top[h] = highest;
    plain_total[h] = total;
  }
  if (TEMPERED) {
    top = lane < parts ? float(blocks[at + 2]) : -INFINITY;
    total = lane < parts ? float(blocks[at + 3]) : 0.0f;
    highest = simd_max(top);
    total = simd_sum(total > 0.0f ? total * exp(top - highest) : 0.0f);
  }
  if (lane == 0) {
    const float weight = WEIGHTED ? float(weights[row * count + h % count]) : 1.0f;
    mass_top[h] = highest;
    if (TEMPERED) {
      warmth[h] = RECIPE ? temperature(as_type<float>(uint(FIRST)), FALLS ? -as_type<float>(uint(RISE)) : as_type<float>(uint(RISE)), STEPS, START, int(newest[row]) - 1) : float(heat[row * count + h % count]);
    }
    if (NOISY && RECIPE) {
      const ulong name = named(named(named(name_of(seed), streams[row]), h), uint(max(int(newest[row]) - 1, 0)));
      low[h] = uint(name);
      high[h] = uint(name >> 32);
    } else if (NOISY) {
      low[h] = names[2 * (row * heads + h)];
      high[h] = names[2 * (row * heads + h) + 1];
    }
    mass_scale[h] = total > 0.0f ? weight / (total * float(heads / count)) : 0.0f;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

if (VALUED) {
  // Strips of lanes share the parts of an element of the output.
  const uint elements = heads * DV;
  const uint strips = max(1u, lanes / elements);
  const uint strip = here / elements;
  for (uint begin = 0; begin < elements; begin += lanes) {
    const uint i = strips > 1 ? here % elements : begin + here;
    float sum = 0.0f;
    if (i < elements && strip < strips) {
      const uint h = i / DV;
      for (uint p = strips > 1 ? strip : 0u; p < parts; p += strips) {
        const uint at = (p * heads + h) * block;
        const float top = blocks[at];
        if (top > -INFINITY) sum += exp(top - plain_top[h]) * blocks[at + 4 + i % DV];
      }
    }
    if (strips > 1) {
      joined[here] = sum;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (here < elements) {
        for (uint s = 1; s < strips; s++) sum += joined[s * elements + here];
      }
    }
    if (i < elements && (strips == 1 || strip == 0)) {
      const float total = plain_total[i / DV];
      output[row * elements + i] = T(total > 0.0f ? sum / total : 0.0f);
    }
  }
}
for (uint j = RECEIVES ? here : length; j < length; j += lanes) {
  const int position = positions[row * length + j];
  float received = 0.0f;
  for (uint h = 0; h < heads; h++) {
    float x = blocks[(j / each * heads + h) * block + 4 + (VALUED ? DV : 0) + j % each];
    if (x > -INFINITY && mass_scale[h] > 0.0f) {
      if (NOISY) x += hashed_gumbel(low[h], high[h], position);
      if (TEMPERED) x = x / warmth[h];
      received += exp(x - mass_top[h]) * mass_scale[h];
    }
  }
  attention[row * length + j] = received;
}
