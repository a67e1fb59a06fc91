// A SIMD group per query: maximum of its logits over the visible slots, and weight / sum of exp(logit - maximum).
//
// products [N, G, T, n] are q . k; logit = scale * product, or (scale * product + noise) / heat.
// stats [N, G, T, 2]. Template: TEMPERED, NOISY (bool).

const uint lane = thread_index_in_simdgroup;
const uint query =
    threadgroup_position_in_grid.x * (threads_per_threadgroup.x / 32) + simdgroup_index_in_threadgroup;
const uint groups = products_shape[1];
const uint count = products_shape[2];
const uint seen = products_shape[3];
const uint length = positions_shape[1];
const uint row = query / (groups * count);
const uint t = query % count;

if (row < uint(products_shape[0])) {
  const int limit = until[row * count + t];
  const float unit = scale[0];
  const float warmth = TEMPERED ? float(heat[row * count + t]) : 1.0f;
  const uint low = NOISY ? uint(names[2 * query]) : 0u;
  const uint high = NOISY ? uint(names[2 * query + 1]) : 0u;
  auto logits = products + ulong(query) * seen;
  auto places = positions + row * length;
  float top = -INFINITY;
  for (uint j = lane; j < seen; j += 32) {
    const int place = places[j];
    float x = logits[j] * unit;
    x = place >= 0 && place <= limit && finite(x) ? x : -INFINITY;
    if (NOISY) x += hashed_gumbel(low, high, place);
    if (TEMPERED) x = x / warmth;
    top = max(top, x);
  }
  top = simd_max(top);
  float sum = 0.0f;
  if (top > -INFINITY) {
    for (uint j = lane; j < seen; j += 32) {
      const int place = places[j];
      float x = logits[j] * unit;
      x = place >= 0 && place <= limit && finite(x) ? x : -INFINITY;
      if (NOISY) x += hashed_gumbel(low, high, place);
      if (TEMPERED) x = x / warmth;
      sum += exp(x - top);
    }
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    stats[2 * query] = top;
    stats[2 * query + 1] = sum > 0.0f ? weights[row * count + t] / sum : 0.0f;
  }
}
