// Curves of several runs on one axis. Each is thinned by itself, so that they have few places in common.

// All places of `curves` ({x, values, at: steps}) in order, and each curve's values there: undefined where another one
// alone has the place, so that the curve goes on over it; what is not finite stays a gap. `at`: the first curve's steps.
export function joined(curves) {
  const x = [...new Set(curves.flatMap((curve) => Array.from(curve.x)))].sort((a, b) => a - b);
  return { x, columns: curves.map((curve) => over(x, curve.x, curve.values)) };
}

// Steps of the first run, those of the other between them, and both runs' values there.
export function pair(steps, values, otherSteps, otherValues) {
  const first = steps[0], last = steps[steps.length - 1];
  const between = [], theirs = [];
  otherSteps.forEach((step, index) => { if (step >= first && step <= last) { between.push(step); theirs.push(otherValues[index]); } });
  const { x, columns } = joined([{ x: steps, values }, { x: between, values: theirs }]);
  return { x, one: columns[0], other: columns[1] };
}

function over(x, places, values) {
  const known = new Map();
  for (let i = 0; i < places.length; i++) known.set(places[i], values[i]);
  return x.map((place) => known.get(place));
}

// The value of the last of `steps` (ascending) up to each of `x`.
export function carried(x, steps, values) {
  let at = -1;
  return Array.from(x, (step) => {
    while (at + 1 < steps.length && steps[at + 1] <= step) at++;
    return values[at];
  });
}

// Values for the plot: null is a gap, undefined no point.
export function drawn(values, log = false) {
  return Array.from(values, (v) => (v === undefined || (Number.isFinite(v) && (!log || v > 0)) ? v : null));
}

// Exponential mean with the weight `share` of what came before, without a bias towards 0 at the begin.
export function smoothed(values, share) {
  let sum = 0, weight = 0;
  return Array.from(values, (value) => {
    if (!Number.isFinite(value)) return value;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}
