// Curves of two runs on one axis. Each is thinned by itself, so that they have few steps in common.

// Steps of the first run, those of the other between them, and both runs' values there: undefined where the other run
// alone has the step, so that the curve goes on over it; what is not finite stays a gap.
export function pair(steps, values, otherSteps, otherValues) {
  const first = steps[0], last = steps[steps.length - 1];
  const between = Array.from(otherSteps).filter((step) => step >= first && step <= last);
  const x = [...new Set([...steps, ...between])].sort((a, b) => a - b);
  return { x, one: over(x, steps, values), other: over(x, otherSteps, otherValues) };
}

function over(x, steps, values) {
  const known = new Map();
  for (let i = 0; i < steps.length; i++) known.set(steps[i], values[i]);
  return x.map((step) => known.get(step));
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
