// A SIMD group per query: maximum of its logits over the visible slots, and weight / sum of exp(logit - maximum).
//
// products [N, G, T, n] are q . k of the queries first .. first + T - 1; logit = scale * product, or (scale * product +
// noise) / heat. stats [N, G, T, 2]. Template: TEMPERED, NOISY, WEIGHTED (bool).

constexpr int U = 8;
const uint lane = thread_index_in_simdgroup;
const uint query =
    threadgroup_position_in_grid.x * (threads_per_threadgroup.x / 32) + simdgroup_index_in_threadgroup;
const uint groups = products_shape[1];
const uint count = products_shape[2];
const uint seen = products_shape[3];
const uint length = positions_shape[1];
const uint row = query / (groups * count);

if (row < uint(products_shape[0])) {
  const uint all = until_shape[1];
  const uint t = first[0] + query % count;
  const int limit = until[row * all + t];
  const float unit = scale[0];
  const float warmth = TEMPERED ? float(heat[row * all + t]) : 1.0f;
  const uint name = 2 * ((row * groups + query / count % groups) * all + t);
  const uint low = NOISY ? uint(names[name]) : 0u;
  const uint high = NOISY ? uint(names[name + 1]) : 0u;
  auto logits = products + ulong(query) * seen;
  auto places = positions + row * length;
  float top = -INFINITY;
  for (uint j = lane; j < seen; j += 32 * U) {
    float x[U];
    int place[U];
    for (int u = 0; u < U; u++) {
      const uint slot = min(j + 32 * u, seen - 1);
      x[u] = logits[slot];
      place[u] = places[slot];
    }
    for (int u = 0; u < U; u++) {
      float logit = x[u] * unit;
      logit = place[u] >= 0 && place[u] <= limit && finite(logit) ? logit : -INFINITY;
      if (NOISY) logit += hashed_gumbel(low, high, place[u]);
      if (TEMPERED) logit = logit / warmth;
      top = max(top, logit);
    }
  }
  top = simd_max(top);
  float sum = 0.0f;
  if (top > -INFINITY) {
    for (uint j = lane; j < seen; j += 32 * U) {
      float x[U];
      int place[U];
      for (int u = 0; u < U; u++) {
        const uint slot = min(j + 32 * u, seen - 1);
        x[u] = logits[slot];
        place[u] = places[slot];
      }
      for (int u = 0; u < U; u++) {
        float logit = x[u] * unit;
        logit = j + 32 * u < seen && place[u] >= 0 && place[u] <= limit && finite(logit) ? logit : -INFINITY;
        if (NOISY) logit += hashed_gumbel(low, high, place[u]);
        if (TEMPERED) logit = logit / warmth;
        sum += exp(logit - top);
      }
    }
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    const float share = WEIGHTED ? float(weights[row * all + t]) : float(weights[0]);
    stats[2 * query] = top;
    stats[2 * query + 1] = sum > 0.0f ? share / sum : 0.0f;
  }
}
