// One self-contained HTML file of what the page shows: its own code, and the answers that the views ask for.
import { MOST_RAW_BYTES, keyOf, load, raw } from './api.js';
import { VECTORS, canProject, curve, lossByPosition, loads, plane, slices, validation, vectorAt, wholeTile } from './asked.js';
import { say } from './i18n.js';
import { causalShape } from './places.js';
import { saveText } from './save.js';
import { place, shapeAt, ui, upTo } from './state.svelte.js';

const MOST_BYTES = 48 * 2 ** 20;

async function each(list, act) {
  for (const one of list) await act(...one).catch(() => null);
}

// The last step of a timeline at each of `steps`, as its view finds it: the newest where the trace has no such step.
function lasts(traced, steps) {
  const newest = traced[traced.length - 1];
  return new Set([newest, ...[...steps].filter((step) => step >= traced[0] && step <= newest)]);
}

export async function exportPage() {
  if (ui.exporting) return;
  const kept = new Map();
  let size = 0;
  const keep = (url, body, most) => {
    const more = body.buffer.byteLength - (kept.get(url)?.buffer.byteLength ?? 0);
    if (size + more > most) return;
    kept.set(url, body);
    size += more;
  };
  // Asked anew in each export: an answer in the cache may be older than the recording.
  const take = async (name, query = {}) => {
    const url = keyOf(name, query);
    const found = await load(url).catch(() => null);
    if (found?.body) keep(url, found.body, MOST_BYTES);
    return found?.value ?? null;
  };
  try {
    ui.exporting = '…';
    for (const [url, body] of [...raw].reverse()) if (url !== 'run') keep(url, body, MOST_RAW_BYTES);
    const facts = await take('run');
    if (!facts) throw new Error(say('The server does not answer: mt-megatron scope report makes the file.', '服务器没有应答：请用 mt-megatron scope report 生成文件。'));
    // An exported page opens at the newest step of its facts; a step that was chosen can be gone to.
    const steps = new Set([facts.last, place.query.step === undefined ? facts.last : Number(place.query.step)]);
    const paths = Object.entries(facts.names);
    const having = (statistic) => paths.filter(([, list]) => list.includes(statistic)).map(([path]) => path);
    await each([['steps', { points: 4000 }], ['alerts'], ['topology'], ['experts', {}], ['runs']], take);
    if (facts.names['']?.includes('validation_loss')) await take(...validation());
    const loss = having('loss_per_position');
    if (loss.length) await take(...lossByPosition(loss[0]));
    const traced = facts.trace ? (await take('timeline_steps'))?.i : null;
    if (traced?.length) for (const last of lasts(traced, steps)) await take(...slices(last));
    const names = new Set(Object.values(facts.names).flat());
    for (const statistic of names) await take('model', { statistic, points: 60 });
    for (const [path, list] of paths) for (const statistic of list) await take(...curve(path, statistic));
    ui.exporting = '…';
    const tensors = (await take('tensors'))?.tensors || [];
    const rows = await take('rows');
    const keys = [];
    for (let i = 0; i < (rows?.table?.length || 0); i += 4) keys.push({ step: rows.table[i], sample: rows.table[i + 1], microbatch: rows.table[i + 2], path: rows.paths[rows.table[i + 3]] });
    for (const step of steps) {
      for (const tensor of tensors) {
        const when = upTo(tensor.steps, step);
        const shape = shapeAt(tensor, when);
        await take(...wholeTile(tensor.id, tensor.what.startsWith('attention') ? causalShape(shape, tensor.index) : shape, when, 'max'));
        if (!tensor.what.startsWith('attention')) await take('summary', { tensor: tensor.id, step: when });
      }
      const maps = new Set(tensors.filter((tensor) => tensor.what === 'attention').map((tensor) => upTo(tensor.steps, step)));
      for (const when of maps) await take('thumbs', { step: when, what: 'attention', side: 48 });
      const spoken = upTo(keys.map((key) => key.step), step);
      for (const key of keys) if (key.step === spoken) await take('tokens', key);
      if (spoken !== null) for (const tensor of tensors.filter(canProject)) await take(...plane(tensor.id, upTo(tensor.steps, spoken)));
      if (step !== facts.last) await take('experts', { step });
      for (const statistic of VECTORS) for (const path of having(statistic)) await take(...vectorAt(path, statistic, step));
    }
    for (const path of having('expert_load')) await take(...loads(path));
    saveText(await compose(kept, facts), `${facts.facts.name}-scope-step-${[...steps].pop() ?? 0}.html`, 'text/html');
    ui.message = { text: `${(size / 2 ** 20).toFixed(1)} MiB` };
  } catch (error) {
    ui.message = { bad: true, text: error.message };
  } finally {
    ui.exporting = '';
  }
}

function base64(buffer) {
  const bytes = new Uint8Array(buffer);
  let text = '';
  for (let start = 0; start < bytes.length; start += 32_768) text += String.fromCharCode(...bytes.subarray(start, start + 32_768));
  return btoa(text);
}

async function compose(kept, facts) {
  const archive = {};
  for (const [key, body] of kept) archive[key] = { data: base64(body.buffer), ...(body.binary ? { binary: true } : {}) };
  const still = { ...facts, facts: { ...facts.facts, live: false } };
  archive.run = { data: base64(new TextEncoder().encode(JSON.stringify(still)).buffer) };
  const stream = new Blob([JSON.stringify(archive)]).stream().pipeThrough(new CompressionStream('gzip'));
  const packed = base64(await new Response(stream).arrayBuffer());
  const [code, style] = await Promise.all(['/assets/page.js', '/assets/page.css'].map((path) => fetch(path).then((answer) => answer.text())));
  const script = code.replace(/<\/script/gi, '<\\/script').replace(/<!--/g, '<\\!--');
  const digest = base64(await crypto.subtle.digest('SHA-256', new TextEncoder().encode(script)));
  const policy = `default-src 'none'; script-src 'sha256-${digest}'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'`;
  const title = String(facts.facts.name).replace(/[<>&"]/g, '');
  // No text is put into the page but its own code and style; the data is base64.
  return ['<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="', policy, '"><title>', title,
    ' · MegaScope</title><style>', style.replace(/<\/style/gi, ''), '</style></head><body><div id="page"></div><', 'script type="text/plain" id="archive">', packed,
    '</', 'script><', 'script type="module">', script, '</', 'script></body></html>'].join('');
}
