// Colours that people with any colour vision can tell apart, in light and dark.

// Sequential: after cividis (Nuñez, Anderton and Renslow 2018), blue to yellow with rising lightness.
const CIVIDIS = ['#00224e', '#123570', '#3b496c', '#575d6d', '#707173', '#8a8678', '#a59c74', '#c3b369', '#e1cc55', '#fee838'];
// Diverging: blue, white or black, orange.
const DIVERGING_LIGHT = ['#08306b', '#2b6fb3', '#8dbfe0', '#f7f7f5', '#f3b76f', '#cf7418', '#7f3b08'];
const DIVERGING_DARK = ['#9ecdf3', '#4f97d1', '#26557f', '#17191c', '#7a4a14', '#cf7f2a', '#fdcb8c'];
// Categories: Okabe and Ito 2008.
export const CATEGORIES = ['#0072b2', '#e69f00', '#009e73', '#cc79a7', '#56b4e9', '#d55e00', '#8c7a00', '#7f7f7f'];
const CATEGORIES_DARK = ['#5aa9e6', '#f0b429', '#35c69a', '#e39bc4', '#8fd0f5', '#ff8a4c', '#d8c64a', '#a5a5a5'];

export function categories(dark) {
  return dark ? CATEGORIES_DARK : CATEGORIES;
}

function rgb(text) {
  return [1, 3, 5].map((start) => parseInt(text.slice(start, start + 2), 16));
}

function ramp(stops, count = 256) {
  const points = stops.map(rgb);
  const found = new Uint32Array(count);
  for (let index = 0; index < count; index++) {
    const place = (index / (count - 1)) * (points.length - 1);
    const low = Math.min(points.length - 2, Math.floor(place));
    const part = place - low;
    const [r, g, b] = points[low].map((value, axis) => Math.round(value + (points[low + 1][axis] - value) * part));
    found[index] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  return found;
}

const sequential = ramp(CIVIDIS);
const diverging = [ramp(DIVERGING_LIGHT), ramp(DIVERGING_DARK)];

export function colours(kind, dark) {
  return kind === 'diverging' ? diverging[dark ? 1 : 0] : sequential;
}

export const BAD = 0xffaa00cc >>> 0; // NaN: magenta, in neither palette
export const ENDLESS = 0xffff00ff >>> 0;

// Colour of each of 256 codes: value = low + scale * code, shown between `from` and `to` by the power `gamma`.
export function lookup(low, scale, from, to, gamma, kind, dark) {
  const palette = colours(kind, dark);
  const found = new Uint32Array(256);
  const span = to - from || 1;
  for (let code = 0; code < 254; code++) {
    const value = low + scale * code;
    let part;
    if (kind === 'diverging') {
      const most = Math.max(Math.abs(from), Math.abs(to)) || 1;
      const size = Math.min(1, Math.abs(value) / most) ** gamma;
      part = 0.5 + (value < 0 ? -0.5 : 0.5) * size;
    } else part = Math.min(1, Math.max(0, (value - from) / span)) ** gamma;
    found[code] = palette[Math.round(part * 255)];
  }
  found[254] = 0xffff40c0;
  found[255] = 0xffc000d0;
  return found;
}

export function css(number) {
  return `rgb(${number & 255} ${(number >> 8) & 255} ${(number >> 16) & 255})`;
}

// Cells that a mask leaves out: a grey that no palette has.
export function maskedColour(dark) {
  return dark ? 0xff44403c : 0xffd4d8da;
}
