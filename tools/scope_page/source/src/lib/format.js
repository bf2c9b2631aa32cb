// Numbers as people read them.

export function short(value, digits = 3) {
  if (value === null || value === undefined) return '–';
  if (typeof value !== 'number') return String(value);
  if (Number.isNaN(value)) return 'NaN';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (size >= 1e5 || size < 1e-3) return value.toExponential(Math.max(0, digits - 1)).replace(/\.?0*e\+?/, 'e').replace('-', '−');
  if (Number.isInteger(value) && size < 1e5) return String(value).replace('-', '−');
  return value.toPrecision(digits).replace(/\.?0+$/, '').replace('-', '−');
}

// Largest error of an encoding: null stands for infinity, which JSON does not have.
export function errorBound(value) {
  return value === 0 ? '0' : `± ${short(value ?? Infinity, 2)}`;
}

const PREFIX = [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']];

export function scaled(value, unit = '', digits = 3) {
  if (!Number.isFinite(value)) return short(value);
  for (const [size, prefix] of PREFIX) if (Math.abs(value) >= size) return `${trimmed(value / size, digits)} ${prefix}${unit}`.trim();
  return `${trimmed(value, digits)} ${unit}`.trim();
}

export function bytes(value) {
  if (!Number.isFinite(value)) return short(value);
  for (const [size, unit] of [[2 ** 40, 'TiB'], [2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']]) if (Math.abs(value) >= size) return `${trimmed(value / size, 3)} ${unit}`;
  return `${value} B`;
}

export function seconds(value) {
  if (!Number.isFinite(value)) return '–';
  if (value === 0) return '0 s';
  if (value < 1e-3) return `${trimmed(value * 1e6, 3)} µs`;
  if (value < 1) return `${trimmed(value * 1e3, 3)} ms`;
  if (value < 120) return `${trimmed(value, 3)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172_800) return `${trimmed(value / 3600, 3)} h`;
  return `${trimmed(value / 86_400, 3)} d`;
}

export function micros(value) {
  return seconds(value / 1e6);
}

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

export function whole(value) {
  return Number.isFinite(value) ? Math.round(value).toLocaleString('en-US').replace(/,/g, '\u2009') : '–';
}

export function percent(value) {
  return Number.isFinite(value) ? `${trimmed(100 * value, 3)} %` : '–';
}
