// Drives Chromium for tests and measurements: node browser.mjs REQUEST.json -> one JSON object on stdout.
// REQUEST: {modules, chromium, url, width, height, theme, language, control, script, actions: [[name, ...arguments], ...], shots}
import { createRequire } from 'node:module';
import { readFileSync } from 'node:fs';

const request = JSON.parse(readFileSync(process.argv[2], 'utf8'));
const { chromium } = createRequire(`${request.modules}/`)('playwright-core');
const browser = await chromium.launch({ executablePath: request.chromium, args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage'] });
const context = await browser.newContext({
  viewport: { width: request.width || 1280, height: request.height || 800 }, colorScheme: request.theme || 'light', locale: 'en-GB', acceptDownloads: true,
});
const page = await context.newPage();
const errors = [], foreign = [], results = [];
page.on('console', (message) => { if (['error', 'warning'].includes(message.type())) errors.push(`${message.text()} (${message.location().url})`); });
page.on('pageerror', (error) => errors.push(`${error.message}\n${error.stack || ''}`));
const own = new URL(request.url).origin;
page.on('request', (asked) => { const url = asked.url(); if (!url.startsWith(own) && !/^(blob|data|file):/.test(url)) foreign.push(url); });
if (request.language) await context.addInitScript((language) => { try { localStorage.setItem('mt-scope-language', language); } catch { /* no storage before the first page */ } }, request.language);
if (request.script) await context.addInitScript(request.script);
if (request.control) await context.addInitScript((token) => { try { sessionStorage.setItem('mt-scope-control', token); } catch { /* as above */ } }, request.control);

const ACTIONS = {
  // Go to an address of the page and wait until nothing is loaded any more.
  async view(address, ms = 250, pictures = false) {
    await page.evaluate((hash) => { location.hash = hash; }, address);
    await page.waitForTimeout(ms);
    await quiet();
    // A first picture may take a moment more: its data has been read, its frame not drawn.
    const ready = () => page.evaluate((wanted) => {
      const canvases = [...document.querySelectorAll('main canvas')];
      return canvases.every((canvas) => window.drawn(canvas) > 1) && (!wanted || (canvases.length && !document.querySelector('main .empty')));
    }, pictures);
    for (let tries = 0; tries < 150 && !(await ready()); tries++) await page.waitForTimeout(100);
    return page.evaluate(() => ({
      text: document.querySelector('main').innerText.slice(0, 4000), empty: Boolean(document.querySelector('main .empty')),
      canvases: [...document.querySelectorAll('main canvas')].map((canvas) => window.drawn(canvas)), wide: document.documentElement.scrollWidth > innerWidth + 1,
      small: [...document.querySelectorAll('main svg path')].length,
    }));
  },
  async shot(path) { await page.screenshot({ path }); return path; },
  async click(selector, index = 0) { await page.locator(selector).nth(index).click(); await quiet(); },
  async double(selector) { await page.locator(selector).first().dblclick(); await quiet(); },
  async fill(selector, text) { await page.locator(selector).first().fill(text); },
  async press(key, ms = 200) { await page.keyboard.press(key); await page.waitForTimeout(ms); await quiet(); return page.evaluate(() => location.hash); },
  async text(selector = 'body') { return page.locator(selector).first().innerText(); },
  // Along the middle of an element, from one part of its width to another.
  async drag(selector, from, to) {
    const box = await page.locator(selector).first().boundingBox(), y = box.y + box.height / 2;
    await page.mouse.move(box.x + from * box.width, y);
    await page.mouse.down();
    await page.mouse.move(box.x + to * box.width, y, { steps: 4 });
    await page.mouse.up();
  },
  async wait(ms) { await page.waitForTimeout(ms); },
  // Asked from here: the page's policy forbids waitForFunction, which evaluates text within the page.
  async until(script, ms = 10000) {
    for (const end = Date.now() + ms; ;) {
      if (await page.evaluate(script)) return true;
      if (Date.now() > end) throw new Error(`not within ${ms} ms: ${script}`);
      await page.waitForTimeout(50);
    }
  },
  async evaluate(script) { return page.evaluate(script); },
  async reload() { await page.reload(); await quiet(); },
  async download(selector, path) {
    const [file] = await Promise.all([page.waitForEvent('download', { timeout: 60000 }), page.locator(selector).first().click()]);
    await file.saveAs(path);
    return path;
  },
  async open(url) { await page.goto(url); await page.waitForSelector('nav a', { timeout: 15000 }); await quiet(); },
};

async function quiet() {
  await page.waitForLoadState('networkidle', { timeout: 8000 }).catch(() => {});
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))).catch(() => {});
}

let failure = null;
try {
  await context.addInitScript(() => {
    // How many colours a canvas shows: one is nothing.
    window.drawn = (canvas) => {
      if (!canvas.width || !canvas.height) return 0;
      const small = new OffscreenCanvas(Math.min(600, canvas.width), Math.min(400, canvas.height));
      const context = small.getContext('2d', { willReadFrequently: true });
      context.imageSmoothingEnabled = false;
      context.drawImage(canvas, 0, 0, small.width, small.height);
      const pixels = new Uint32Array(context.getImageData(0, 0, small.width, small.height).data.buffer), seen = new Set();
      for (let i = 0; i < pixels.length && seen.size < 12; i += 3) seen.add(pixels[i]);
      return seen.size;
    };
  });
  await page.goto(request.url);
  await page.waitForSelector('nav a', { timeout: 15000 });
  await quiet();
  for (const [name, ...rest] of request.actions) results.push(await ACTIONS[name](...rest));
} catch (error) {
  failure = `${error.message}\n${error.stack}`;
} finally {
  await browser.close();
}
console.log(JSON.stringify({ errors, foreign, results, failure }));
