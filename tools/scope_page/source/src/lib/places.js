// Names of what a tensor's index counts, for people; and where its rows and columns lie in the sequence.

const NOT_NAMED = new Set(['token_first', 'token_step', 'query_first', 'query_step', 'key_step']);

export function indexText(index) {
  return Object.entries(index).filter(([key]) => !NOT_NAMED.has(key)).map(([key, value]) => `${key} ${value}`).join(' · ');
}

export function rowAt(index) {
  const first = index.query_first ?? index.token_first ?? 0, step = index.query_step ?? index.token_step ?? 1;
  return (row) => first + row * step;
}

export function columnAt(index) {
  const step = index.key_step ?? 1;
  return (column) => column * step;
}

// Shape of a causal attention map without the keys that come after its last query.
export function causalShape(shape, index) {
  const rows = shape.slice(0, -1).reduce((a, b) => a * b, 1), columns = shape[shape.length - 1];
  const last = rowAt(index)(rows) - 1, step = index.key_step ?? 1;
  return [...shape.slice(0, -1), Math.max(1, Math.min(columns, Math.floor(last / step) + 1))];
}
