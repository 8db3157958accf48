// Drawing: canvases of the right resolution, colors, axes and number formats.

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
export const BAND_COLORS = 12;

/** Return a size in bytes as text with three significant digits: "2.60 GiB". */
export function formatBytes(bytes) {
  let value = Math.abs(bytes);
  let unit = 0;
  while (value >= 1023.5 && unit < BYTE_UNITS.length - 1) {
    value /= 1024;
    unit++;
  }
  const digits = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${bytes < 0 ? "−" : ""}${value.toFixed(digits)} ${BYTE_UNITS[unit]}`;
}

/** Return a whole number with commas: "7,712". */
export function formatCount(value) {
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ",");
}

/** Return a share as a percentage, as reports print it: "89.7%", "<0.1%". */
export function formatShare(share) {
  if (share > 0 && share < 0.0005) return "<0.1%";
  return `${(share * 100).toFixed(1)}%`;
}

/** Return microseconds as a duration: "3.22 ms". */
export function formatMicroseconds(us) {
  const [value, unit] = us < 1e3 ? [us, "us"] : us < 1e6 ? [us / 1e3, "ms"] : [us / 1e6, "s"];
  return `${value >= 100 || unit === "us" ? value.toFixed(0) : value.toPrecision(3)} ${unit}`;
}

/** Return microseconds as seconds, to the microsecond: "3.351234 s". */
export function formatSeconds(us) {
  return `${(us / 1e6).toFixed(6)} s`;
}

/** Return an element with attributes and children; texts become text nodes, never markup. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A canvas as wide as its parent that is redrawn when its size or the color scheme changes. */
export class Surface {
  constructor(height, label, draw) {
    this.height = height;
    this.draw = draw;
    this.canvas = make("canvas", { role: "img", "aria-label": label, tabindex: "0" });
    this.element = make("div", { class: "surface" }, this.canvas);
    this.width = 0;
    new ResizeObserver(() => this.redraw()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    addEventListener("beforeprint", () => this.redraw());
  }

  redraw() {
    const width = this.element.clientWidth;
    if (!width) return; // the surface is in a tab that is not shown
    const scale = Math.min(devicePixelRatio || 1, 3);
    this.width = width;
    this.scale = scale;
    const [pixelWidth, pixelHeight] = [Math.round(width * scale), Math.round(this.height * scale)];
    if (this.canvas.width !== pixelWidth || this.canvas.height !== pixelHeight) {
      this.canvas.width = pixelWidth;
      this.canvas.height = pixelHeight;
      this.canvas.style.height = `${this.height}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, this.height);
    context.font = "12px system-ui, sans-serif";
    this.draw(context, width, this.height, theme(this.element));
  }

  /** Return the coordinates of a pointer event, in pixels of the surface. */
  position(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
}

/** Return the colors of the style sheet that apply to an element. */
export function theme(element) {
  const style = getComputedStyle(element);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: color("ink"),
    muted: color("muted"),
    line: color("line"),
    faint: color("faint"),
    surface: color("surface"),
    accent: color("accent"),
    error: color("error"),
    reserved: color("hatch"),
    bands: Array.from({ length: BAND_COLORS }, (_, i) => color(`band${i}`)),
    rest: color("band-rest"),
  };
}

/** Return about `count` round values from `low` to `high`; the step is a power of two, or with base 10: 1, 2 or 5 times a power of ten. */
export function ticks(low, high, count, base) {
  const smallestStep = (high - low) / count;
  if (!(smallestStep > 0)) return [low];
  let step = 2 ** Math.ceil(Math.log2(smallestStep));
  if (base === 10) {
    const power = 10 ** Math.floor(Math.log10(smallestStep));
    step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= smallestStep);
  }
  const values = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) values.push(i * step);
  return values;
}

/** Return a color as the 32-bit number of a pixel of ImageData. */
export function pixelOf(context, color) {
  context.fillStyle = color;
  const hex = Number.parseInt(context.fillStyle.slice(1), 16);
  // Red is the first byte of a pixel; all machines that run browsers are little-endian.
  return ((255 << 24) | ((hex & 255) << 16) | (((hex >> 8) & 255) << 8) | (hex >> 16)) >>> 0;
}

/** Return a text that fits into a width, cut with an ellipsis. */
export function fitted(context, text, width) {
  if (width < 12) return "";
  if (context.measureText(text).width <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return low ? `${text.slice(0, low)}…` : "";
}

/** Return a text or, if the text is wider than `width`, "…" and the longest end that fits. */
export function fittedEnd(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let [low, high] = [1, text.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (context.measureText(`…${text.slice(middle)}`).width <= width) high = middle;
    else low = middle + 1;
  }
  return `…${text.slice(low)}`;
}

/** A box of lines that follows the pointer. */
export class Tooltip {
  constructor() {
    this.element = make("div", { class: "tooltip", role: "status", hidden: true });
  }

  show(event, lines) {
    this.element.replaceChildren(...lines.map((line) => make("div", {}, line)));
    this.element.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
    const top = event.clientY + 16 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 16;
    this.element.style.left = `${Math.max(left, 4)}px`;
    this.element.style.top = `${Math.max(top, 4)}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}

/** A scrollable list of any length, which creates elements only for the visible rows. */
export class VirtualList {
  constructor(height, rowHeight, makeRow) {
    this.rowHeight = rowHeight;
    this.makeRow = makeRow;
    this.length = 0;
    this.space = make("div", { class: "list-space" });
    this.element = make("div", { class: "list", tabindex: "0", onscroll: () => this.redraw() }, this.space);
    this.element.style.height = `${height}px`;
    new ResizeObserver(() => this.redraw()).observe(this.element);
  }

  // The number of rows' pixels per scrolled pixel. Browsers limit the height of an element to about ten million
  // pixels, so that longer lists scroll in larger steps.
  get #step() {
    return Math.max(1, (this.length * this.rowHeight) / 8e6);
  }

  setLength(length) {
    this.length = length;
    this.space.style.height = `${(length * this.rowHeight) / this.#step}px`;
    this.redraw();
  }

  scrollTo(index) {
    const top = (index * this.rowHeight) / this.#step;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop || top + this.rowHeight > scrollTop + clientHeight) {
      this.element.scrollTop = Math.max(0, top - clientHeight / 2);
    }
    this.redraw();
  }

  redraw() {
    const { scrollTop, clientHeight } = this.element;
    if (!clientHeight) return;
    const visible = Math.ceil(clientHeight / this.rowHeight) + 1;
    const first = Math.max(0, Math.min(Math.floor((scrollTop * this.#step) / this.rowHeight), this.length - visible + 1));
    const rows = [];
    for (let i = first; i < Math.min(first + visible, this.length); i++) {
      const row = this.makeRow(i);
      row.style.top = `${scrollTop + (i - first) * this.rowHeight - (this.#step > 1 ? 0 : scrollTop - first * this.rowHeight)}px`;
      rows.push(row);
    }
    this.space.replaceChildren(...rows);
  }
}
