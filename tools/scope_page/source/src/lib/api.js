// Data of the server by name, out of a bounded cache; in an exported page out of its archive.

const MOST_BYTES = 160 * 2 ** 20;
export const MOST_RAW_BYTES = 24 * 2 ** 20; // Bodies of views: half of what an export may have.
const MOST_MS = 120_000; // Until an answer begins: a connection lost without a word would be waited for otherwise.
const cache = new Map(); // key -> {promise, bytes}
let cached = 0;
let archive = null; // key -> base64 of the answer's body
const TYPES = {
  float32: Float32Array, float64: Float64Array, int32: Int32Array, uint32: Uint32Array,
  int16: Int16Array, uint16: Uint16Array, uint8: Uint8Array,
};

// Of this tab: sessionStorage belongs to a tab and to this port, where a cookie would go to every port of 127.0.0.1.
export function kept(name) {
  try { return sessionStorage.getItem(`mt-scope-${name}`) || ''; } catch { return ''; }
}
export function keep(name, value) {
  try { sessionStorage.setItem(`mt-scope-${name}`, value); } catch { /* private window */ }
}

let session = kept('session');
export const sessionToken = () => session;
// Set where the server has ended: what is not known is not asked for any more.
let closed = false;
export function close() { closed = true; }
// Resolves once no answer is under way.
let underWay = 0;
export async function idle() {
  do await new Promise((done) => setTimeout(done, 100)); while (underWay);
}
const headers = (more = {}) => ({ 'X-Scope-Session': session, ...more });

export class ApiError extends Error {
  constructor(text, status) {
    super(text);
    this.status = status;
  }
}

export function keyOf(name, query = {}) {
  const pairs = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  pairs.sort(([a], [b]) => (a < b ? -1 : 1));
  const text = new URLSearchParams(pairs.map(([k, v]) => [k, String(v)])).toString();
  return text ? `${name}?${text}` : name;
}

// Freshness of an answer about a step that `newer` others follow: of the newest steps other ranks' parts may
// still come. Later the step is asked for once more: 0 is the revision of a page that was just opened.
export function freshness(newer, revision) {
  return newer > 2 ? -1 : revision;
}

// `fresh`: a number that grows with the recording; another one asks again.
export function get(name, query = {}, fresh = 0) {
  const url = keyOf(name, query);
  const key = `${url} ${fresh}`;
  const known = cache.get(key);
  if (known) {
    cache.delete(key);
    cache.set(key, known);
    return known.promise;
  }
  const entry = { bytes: 2_000, promise: null };
  underWay += 1;
  const answer = load(url).finally(() => { underWay -= 1; });
  entry.promise = answer.then(
    ({ value, bytes, body }) => {
      if (body) remember(url, body);
      // The cache may have dropped it under way, and counts it no more.
      if (cache.get(key) !== entry) return value;
      entry.bytes += bytes;
      cached += bytes;
      trim();
      return value;
    },
    (error) => {
      if (cache.get(key) === entry) {
        cache.delete(key);
        cached -= entry.bytes;
      }
      throw error;
    },
  );
  cache.set(key, entry);
  cached += entry.bytes;
  return entry.promise;
}

function trim() {
  for (const [key, entry] of cache) {
    if (cached <= MOST_BYTES) return;
    cache.delete(key);
    cached -= entry.bytes;
  }
}

// An answer, not out of the cache: its value, and its body as it came (of an exported page none).
export async function load(url) {
  if (archive) {
    const text = archive[url];
    if (text === undefined) throw new ApiError('not in this export', 404);
    const bytes = Uint8Array.from(atob(text.data), (each) => each.charCodeAt(0));
    return { value: text.binary ? unpack(bytes.buffer) : JSON.parse(new TextDecoder().decode(bytes)), bytes: bytes.length };
  }
  if (closed) throw new ApiError('the run has ended', 0);
  const asked = async () => {
    const late = new AbortController();
    const timer = setTimeout(() => late.abort(), MOST_MS);
    try {
      return await fetch(`/api/${url}`, { credentials: 'omit', headers: headers(), signal: late.signal });
    } finally {
      clearTimeout(timer);
    }
  };
  let answer = await asked();
  for (let tries = 0; answer.status === 503 && tries < 4; tries++) {
    await new Promise((done) => setTimeout(done, 150 * 2 ** tries));
    answer = await asked();
  }
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new ApiError(said.error || answer.statusText, answer.status);
  }
  const binary = answer.headers.get('content-type').startsWith('application/vnd');
  const buffer = await answer.arrayBuffer();
  return { value: binary ? unpack(buffer) : JSON.parse(new TextDecoder().decode(buffer)), bytes: buffer.byteLength, body: { buffer, binary } };
}

// Newest bodies of what the views asked for, for the export. Bounded by bytes: the cache's values lie in the same buffers.
export const raw = new Map();
let rawBytes = 0;

function remember(url, body) {
  rawBytes += body.buffer.byteLength - (raw.get(url)?.buffer.byteLength ?? 0);
  raw.delete(url);
  raw.set(url, body);
  if (rawBytes <= MOST_RAW_BYTES) return;
  // Of the same name first: timelines of many steps do not push out what other views asked for.
  const name = url.split('?')[0];
  const alike = [...raw.keys()].filter((each) => each !== url && each.split('?')[0] === name);
  for (const each of [...alike, ...raw.keys()]) {
    rawBytes -= raw.get(each)?.buffer.byteLength ?? 0;
    raw.delete(each);
    if (rawBytes <= MOST_RAW_BYTES) return;
  }
}

function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const start = 4 + length;
  for (const row of header.arrays) {
    const count = row.shape.reduce((a, b) => a * b, 1);
    const array = new TYPES[row.dtype](buffer, start + row.offset, count);
    array.shape = row.shape;
    header[row.name === 'rows' ? 'table' : row.name] = array;
  }
  return header;
}

// Commands.

export async function post(path, body, token) {
  const answer = await fetch(`/api/${path}`, {
    method: 'POST',
    credentials: 'omit',
    headers: headers({ 'Content-Type': 'application/json', 'X-Scope-Control': token || '' }),
    body: JSON.stringify(body),
  });
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new ApiError(said.error || answer.statusText, answer.status);
  return said;
}

// A link: exchange its ticket, which lies behind # and goes into no request for a file, for this tab's session.
// Returns the control token of a link that hands over control.
export async function enter() {
  if (location.pathname !== '/open') return null;
  const ticket = new URLSearchParams(location.hash.slice(1)).get('ticket') || '';
  history.replaceState(null, '', '/');
  const found = await post('open', { ticket });
  session = found.session;
  keep('session', session);
  return found.control;
}

// Exported pages.

export function archived() {
  return document.getElementById('archive') !== null;
}

export async function loadArchive() {
  const packed = Uint8Array.from(atob(document.getElementById('archive').textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  archive = JSON.parse(await new Response(stream).text());
}
