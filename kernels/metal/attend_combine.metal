// The parts of attend.metal, joined: the output of every head, and the mass of a tile of slots.
//
//   mass_j = sum_h weight_t exp(logits[h, j] - top_h) / total_h / query heads       (of the tempered logits, if there are)
//
// A threadgroup per (row, tile of slots); the elements of the output are dealt to the lanes of all tiles of a row.
// Template: DV (int), VALUED, TEMPERED, NOISY, WEIGHTED (bool).

const uint row = threadgroup_position_in_grid.x;
const uint tile = threadgroup_position_in_grid.y;
const uint tiles = threadgroups_per_grid.y;
const uint here = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint lane = here % 32;
const uint length = logits_shape[2];
const uint heads = logits_shape[1];
const uint parts = tops_shape[1];
const uint count = until_shape[1];
threadgroup float plain_top[128];
threadgroup float plain_total[128];
threadgroup float mass_top[128];
threadgroup float mass_scale[128];

for (uint h = here / 32; h < heads; h += lanes / 32) {
  const uint at = (row * parts + lane) * heads + h;
  const float mine = lane < parts ? float(tops[at]) : -INFINITY;
  float top = simd_max(mine);
  float total = simd_sum(mine > -INFINITY ? sums[at] * exp(mine - top) : 0.0f);
  if (lane == 0) {
    plain_top[h] = top;
    plain_total[h] = total;
  }
  if (TEMPERED) {
    const float warm = lane < parts ? float(tempered_tops[at]) : -INFINITY;
    top = simd_max(warm);
    total = simd_sum(warm > -INFINITY ? tempered_sums[at] * exp(warm - top) : 0.0f);
  }
  if (lane == 0) {
    const float weight = WEIGHTED ? float(weights[row * count + h % count]) : 1.0f;
    mass_top[h] = top;
    mass_scale[h] = total > 0.0f ? weight / (total * float(heads / count)) : 0.0f;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

if (VALUED) {
  for (uint i = tile * lanes + here; i < heads * DV; i += tiles * lanes) {
    const uint h = i / DV;
    float joined = 0.0f;
    for (uint p = 0; p < parts; p++) {
      const uint at = (row * parts + p) * heads + h;
      const float highest = tops[at];
      if (highest > -INFINITY) joined += exp(highest - plain_top[h]) * partial[at * DV + i % DV];
    }
    output[row * heads * DV + i] = T(plain_total[h] > 0.0f ? joined / plain_total[h] : 0.0f);
  }
}
for (uint j = tile * lanes + here; j < length; j += tiles * lanes) {
  float received = 0.0f;
  for (uint h = 0; h < heads; h++) {
    float x = logits[(row * heads + h) * length + j];
    if (x > -INFINITY && mass_scale[h] > 0.0f) {
      if (NOISY) {
        const uint name = 2 * (row * heads + h);
        x += hashed_gumbel(names[name], names[name + 1], positions[row * length + j]);
      }
      if (TEMPERED) x = x / tau[row * count + h % count];
      received += exp(x - mass_top[h]) * mass_scale[h];
    }
  }
  mass[row * length + j] = received;
}
