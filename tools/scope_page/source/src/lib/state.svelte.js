// What all views share: where we are (the address behind #), what is new, who may command.
import { untrack } from 'svelte';
import { archived, close, get, idle, keep, kept, load, post, sessionToken } from './api.js';

export const VIEWS = ['run', 'topology', 'timeline', 'model', 'tensor', 'attention', 'tokens', 'experts', 'generate', 'replay', 'lab'];

export const place = $state({ view: 'run', query: {} });
export const ui = $state({
  theme: stored('theme') || 'auto', language: stored('language') || (navigator.language.startsWith('zh') ? 'zh' : 'en'),
  help: false, asking: false, exporting: '', message: null, dark: false,
});
export const live = $state({ connected: false, revision: 0, dropped: 0, last: null, ended: false, alerts: 0, result: null, paused: false, state: null, over: false, gone: false });
// Part of each axis of curves that is looked at; all charts of an axis have the same.
export const zoom = $state({ step: null, tokens: null, time: null });
export const control = $state({ token: kept('control') });
const holder = $state({ facts: null, error: null });
export { holder as about };

export function stored(name) {
  try { return localStorage.getItem(`mt-scope-${name}`); } catch { return null; }
}
export function store(name, value) {
  try { localStorage.setItem(`mt-scope-${name}`, value); } catch { /* private window */ }
}

// Address.

export function readAddress() {
  const [path, text = ''] = location.hash.replace(/^#\/?/, '').split('?');
  const view = VIEWS.includes(path) ? path : 'run';
  place.view = view;
  place.query = Object.fromEntries(new URLSearchParams(text));
}

// Whether an address has a parameter: the empty path of a module is the whole model's.
const says = (key, value) => value !== null && value !== undefined && (value !== '' || key === 'module');

export function address(view, query) {
  const pairs = Object.entries(query).filter(([key, value]) => says(key, value));
  const text = new URLSearchParams(pairs).toString();
  return `#/${view}${text ? `?${text}` : ''}`;
}

export function go(view, query = {}) {
  const step = place.query.step;
  location.hash = address(view, { ...(step ? { step } : {}), ...query });
}

// Changes parameters of the view without a new entry of the history.
export function set(query) {
  const next = { ...place.query, ...query };
  for (const key of Object.keys(next)) if (!says(key, next[key])) delete next[key];
  place.query = Object.fromEntries(Object.entries(next).map(([key, value]) => [key, String(value)]));
  history.replaceState(null, '', address(place.view, place.query));
}

export const at = {
  // The step that is looked at; the newest where none is chosen.
  get step() { return place.query.step !== undefined ? Number(place.query.step) : (holder.facts?.last ?? null); },
  get follows() { return place.query.step === undefined; },
};

// The last of `steps` (ascending) up to the step that is looked at.
export function upTo(steps, step = at.step) {
  if (!steps?.length) return null;
  if (step === null) return steps[steps.length - 1];
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1; else high = middle;
  }
  return low ? steps[low - 1] : steps[0];
}

// What was recorded of a tensor at a step, as a number: shards of other ranks may come later.
export function stampOf(tensor, step) {
  const found = tensor?.stamps?.[tensor.steps.lastIndexOf(step)];
  return found ?? 0;
}

// Shape of a tensor at a step: another request records another part of it. `shapes`: [from step, shape], ascending.
export function shapeAt(tensor, step) {
  let found = tensor.shapes[0][1];
  for (const [from, shape] of tensor.shapes) if (from <= step) found = shape;
  return found;
}

// The first step at which a tensor had the shape of `step`: a projection takes its basis there.
export function firstLike(tensor, step) {
  const shape = String(shapeAt(tensor, step));
  return tensor.shapes.find((each) => String(each[1]) === shape)[0];
}

// Data that follows what `request` (a function of reactive values) asks for: name, query, and a number that
// another state of the recording changes; `growing`: ask again whenever the recording has grown. The old value stays
// until the new one is there. An answer under way is shown before the same is asked again: were it dropped, a server
// that takes longer than the recording to grow would never be seen to answer.
export function data(request, { growing = false } = {}) {
  let state = $state.raw({ value: null, error: null, loading: true });
  let pending = null, answered = '';
  function ask(wanted, fresh) {
    // Steps in a query move by themselves while the newest one is followed: the question stays the same.
    const steps = untrack(() => at.follows) ? { step: undefined, first: undefined, last: undefined } : {};
    const key = JSON.stringify([wanted[0], { ...wanted[1], ...steps }]);
    if (pending?.key === key) {
      pending.next = [wanted, fresh];
      return;
    }
    const mine = { key, next: null };
    pending = mine;
    const before = untrack(() => state);
    state = { ...before, loading: true };
    const shown = (answer) => {
      if (pending !== mine) return;
      pending = null;
      if (answer.value) answered = key;
      state = { ...answer, loading: false };
      if (mine.next) ask(...mine.next);
    };
    get(wanted[0], wanted[1] || {}, fresh).then(
      (value) => shown({ value, error: null }),
      // What is drawn stays where the server has gone: only another question has no answer then.
      (error) => shown(mine.next || (!error.status && answered === key && state.value) ? { value: state.value, error: null } : { value: null, error }),
    );
  }
  $effect(() => {
    const wanted = request();
    const fresh = growing ? live.revision : wanted?.[2] ?? 0;
    if (wanted) {
      ask(wanted, fresh);
      return;
    }
    pending = null;
    state = { value: null, error: null, loading: false };
  });
  $effect(() => () => { pending = null; });
  return {
    get value() { return state.value; },
    get error() { return state.error; },
    get loading() { return state.loading; },
  };
}

// Run and notices.

const FIRST_PAUSE_MS = 3_000; // Until the next try to connect; twice as long after each one.
const FIRST_PICTURES = [['steps', { points: 4000 }], ['alerts'], ['tensors'], ['rows'], ['topology'], ['experts', {}], ['model', { statistic: 'activation_rms', points: 60 }]];

export async function refresh() {
  try {
    holder.facts = await get('run', {}, live.revision);
    holder.error = null;
  } catch (error) {
    if (error.status || !holder.facts) holder.error = error;
  }
}

// The command that opens this run's page again.
export const folder = () => { const path = holder.facts?.facts.folder || 'RUN'; return /^[\w./+@%:=,-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`; };
export const reopen = () => `mt-megatron scope open ${folder()}`;

function takeState(state) {
  if (!state) return;
  live.state = state;
  live.paused = Boolean(state.paused);
}

let socket = null;
let grown = false;
let pauseMs = FIRST_PAUSE_MS;

// The run has ended: take the last state of what is shown and the first picture of each other view, then leave.
async function finish() {
  live.revision += 1;
  await refresh();
  const fresh = live.revision;
  const traced = holder.facts.trace ? get('timeline_steps', {}, fresh) : Promise.resolve(null);
  const list = [...FIRST_PICTURES.map(([name, query]) => get(name, query, fresh)), get('runs'), traced];
  await Promise.allSettled(list);
  await idle();
  live.over = true;
  live.paused = false;
  close();
  socket?.close();
}

export function connect() {
  if (archived() || socket) return;
  socket = new WebSocket(`${location.protocol === 'https:' ? 'wss' : 'ws'}://${location.host}/live`);
  socket.onopen = () => socket.send(JSON.stringify({ do: 'session', token: sessionToken() }));
  socket.onmessage = (message) => {
    const event = JSON.parse(message.data);
    if (event.k === 'entered') {
      live.connected = true;
      live.gone = false;
      pauseMs = FIRST_PAUSE_MS;
      // Notices before it are lost: what was recorded meanwhile is asked for.
      grown = true;
      get('server', {}, Math.random()).then((server) => takeState(server.state), () => {});
      return;
    }
    // All notices missed so far; those that an event 'lost' tells of are among them.
    if (event.browser_dropped) live.dropped = event.browser_dropped;
    if (event.k === 'ended') finish();
    if (event.k === 'result') live.result = event;
    if (event.k === 'alert') live.alerts += 1;
    if (event.k === 'result' && event.id === 'state') takeState(event.value);
    if (event.k === 'result' && event.id === 'token') return;
    grown = true;
  };
  socket.onclose = async () => {
    live.connected = false;
    socket = null;
    if (live.over) return;
    // A session that has ended never comes back: another link must be opened.
    live.ended = await Promise.race([
      load('server').then(() => false, (error) => error.status === 401),
      new Promise((done) => setTimeout(done, 5_000, false)),
    ]);
    if (live.ended) return;
    live.gone = true;
    setTimeout(connect, pauseMs);
    pauseMs *= 2;
  };
}

// At most once a second, and not in a hidden tab: a page that nobody sees asks for nothing.
setInterval(() => {
  if (!grown || document.hidden) return;
  grown = false;
  live.revision += 1;
  refresh();
}, 1_000);

// Control.

// `quiet`: the caller shows what went wrong where it was asked for, so that no error is told twice.
export async function command(what, args = {}, { quiet = false } = {}) {
  if (!control.token) {
    ui.asking = true;
    throw new Error('control token needed');
  }
  try {
    const answer = await post('command', { do: what, arguments: args }, control.token);
    if (answer.value && typeof answer.value.paused === 'boolean') live.paused = answer.value.paused;
    else if (answer.ok && what === 'pause') live.paused = true;
    else if (answer.ok && what === 'resume') live.paused = false;
    if (!answer.ok && !quiet) ui.message = { bad: true, text: answer.error };
    return answer;
  } catch (error) {
    if (error.status === 403) { takeControl(''); ui.asking = true; }
    if (!quiet) ui.message = { bad: true, text: error.message };
    throw error;
  }
}

export function takeControl(token) {
  control.token = token;
  keep('control', token);
}

// A pause ends by itself where no controller says that it is there.
setInterval(() => {
  if (control.token && live.connected && live.paused && !live.over) post('command', { do: 'hold', arguments: {} }, control.token).catch(() => {});
}, 30_000);
