// Queries that views ask for and the export fetches ahead: an exported page finds an answer by exactly its query.

export const TIMELINE_STEPS = 3;

// Slices of `count` steps up to `last`.
export function slices(last, count = TIMELINE_STEPS) {
  return ['timeline', { first: Math.max(0, last - count + 1), last, most: 200_000 }];
}

// One statistic of one module over the steps; of another run if given.
export function curve(path, statistic, run = null) {
  return ['series', { run, path, statistic, points: 600 }];
}

export function validation(run = null) {
  return ['series', { run, path: '', statistic: 'validation_loss', points: 2000 }];
}

// Statistics whose vector is shown beside their curve.
export const VECTORS = ['histogram', 'expert_load', 'outlier_channels'];

// The newest vector of a statistic up to a step.
export function vectorAt(path, statistic, step) {
  return ['vectors', { path, statistic, last: step, points: 1 }];
}

// Tokens of each expert of a router over the steps.
export function loads(path) {
  return ['vectors', { path, statistic: 'expert_load', points: 400 }];
}

export function lossByPosition(path) {
  return ['vectors', { path, statistic: 'loss_per_position', points: 300 }];
}

// Rows of a tensor on a plane.
export function plane(tensor, step) {
  return ['projection', { tensor, step }];
}

export function canProject(tensor) {
  return ['residual', 'activation', 'context', 'mlp'].includes(tensor.what) && tensor.shape[tensor.shape.length - 1] > 2;
}

// The whole of a tensor as one tile.
export function wholeTile(tensor, shape, step, by) {
  const rows = shape.slice(0, -1).reduce((a, b) => a * b, 1), columns = shape[shape.length - 1] || 1;
  const level = Math.max(0, Math.ceil(Math.log2(Math.max(rows, columns) / 256)));
  return ['tile', { tensor, step, level, row: 0, column: 0, by }];
}
