// Values with some rows replaced by a mean with those of the losers: a threadgroup takes 32 slots of a row of streams.
// Template: T (type), DV (int), NORMALISE (bool).

const uint row = threadgroup_position_in_grid.y;
const uint lane = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint size = values_shape[1];
const uint losers = lost_shape[1], targets = into_shape[1];
const uint begin = threadgroup_position_in_grid.x * 32;
const uint slots = min(32u, size - begin);
threadgroup int target_of[32];
threadgroup float weight_of[32];

for (uint s = lane; s < 32; s += lanes) {
  target_of[s] = -1;
  weight_of[s] = 0.0f;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint k = lane; k < targets; k += lanes) {
  const uint slot = uint(into[row * targets + k]);
  if (slot >= begin && slot < begin + slots) {
    float total = 0.0f;
    for (uint l = 0; l < losers; l++) total = total + weights[(ulong(row) * losers + l) * targets + k];
    target_of[slot - begin] = int(k);
    weight_of[slot - begin] = total;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

auto content = values + ulong(row) * size * DV;
auto merged = out + ulong(row) * size * DV;
for (uint i = lane; i < slots * DV; i += lanes) {
  const uint slot = i / DV, e = i % DV;
  const ulong at = ulong(begin + slot) * DV + e;
  const float total = weight_of[slot];
  if (total > 0.0f) {
    float given = 0.0f;
    for (uint l = 0; l < losers; l++) {
      const float x = float(content[ulong(lost[row * losers + l]) * DV + e]);
      // Not finite: nothing, since 0 times it would be NaN.
      if (finite(x)) given = given + product(weights[(ulong(row) * losers + l) * targets + uint(target_of[slot])], x);
    }
    const float sum = float(content[at]) + given;
    merged[at] = T(NORMALISE ? sum / (1.0f + total) : sum);
  } else {
    merged[at] = content[at];
  }
}
