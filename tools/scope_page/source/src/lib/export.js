// One self-contained HTML file of what the page shows: its own code, and the answers that the views ask for.
import { MOST_RAW_BYTES, keyOf, load, raw } from './api.js';
import { at, ui, upTo } from './state.svelte.js';

const MOST_BYTES = 48 * 2 ** 20;

async function each(list, act) {
  for (const one of list) await act(...one).catch(() => null);
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
    await each([['steps', { points: 4000 }], ['alerts'], ['topology'], ['timeline_steps'], ['timeline', { most: 40_000 }], ['tensors'], ['rows'], ['experts', {}], ['runs'],
      ['vectors', { path: lossPath(facts), statistic: 'loss_per_position', points: 300 }]], take);
    const names = new Set(Object.values(facts.names).flat());
    for (const statistic of names) await take('model', { statistic, points: 60 });
    for (const [path, list] of Object.entries(facts.names)) for (const statistic of list) await take('series', { path, statistic, points: 600 });
    ui.exporting = '…';
    const tensors = (await take('tensors'))?.tensors || [];
    for (const tensor of tensors) {
      const step = upTo(tensor.steps);
      const top = Math.max(0, Math.ceil(Math.log2(Math.max(...matrix(tensor.shape)) / 256)));
      await take('tile', { tensor: tensor.id, step, level: top, row: 0, column: 0, by: 'max' });
      if (tensor.what !== 'attention') await take('summary', { tensor: tensor.id, step });
    }
    const shown = new Set(tensors.filter((tensor) => tensor.what === 'attention').map((tensor) => upTo(tensor.steps)));
    for (const step of shown) await take('thumbs', { step, what: 'attention', side: 48 });
    const rows = await take('rows');
    if (rows?.table?.length) {
      const last = upTo(Array.from({ length: rows.table.length / 4 }, (_, i) => rows.table[4 * i]));
      for (let i = 0; i < rows.table.length; i += 4) if (rows.table[i] === last) await take('tokens', { step: last, sample: rows.table[i + 1], microbatch: rows.table[i + 2], path: rows.paths[rows.table[i + 3]] });
    }
    await save(await compose(kept, facts), `${facts.facts.name}-scope-step-${at.step ?? 0}.html`);
    ui.message = { text: `${(size / 2 ** 20).toFixed(1)} MiB` };
  } catch (error) {
    ui.message = { bad: true, text: error.message };
  } finally {
    ui.exporting = '';
  }
}

function lossPath(facts) {
  return Object.keys(facts.names).find((path) => facts.names[path].includes('loss_per_position')) || '';
}

const matrix = (shape) => [shape.slice(0, -1).reduce((a, b) => a * b, 1), shape[shape.length - 1] || 1];

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

async function save(text, name) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], { type: 'text/html' }));
  link.download = name.replace(/[^\w.-]/g, '_');
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
