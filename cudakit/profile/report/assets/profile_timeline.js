// The timeline: a row for each stream, for the idle time of each device, and for the ranges and API calls of each thread.

import { BAND_COLORS, Surface, fitted, pixelOf, ticks } from "./canvas.js";
import { ScreenAxis, addGestures } from "./gestures.js";
import { firstAtLeast } from "./profile_model.js";
import { formatNanoseconds, formatTime, tickText } from "./profile_time.js";

// Sizes in pixels: the labels of the rows, the space right of the plot, the time axis, a heading, a row.
const LEFT = 150;
const RIGHT = 8;
const AXIS = 22;
const HEADING = 20;
const HEIGHTS = { work: 20, idle: 8, range: 15, call: 12 };
const GAP = 3;
const NEAR = 3; // largest distance of the pointer from a span that it picks
const WIDEST_TEXTS = 400; // number of spans whose names are drawn

export class Timeline {
  constructor(app) {
    this.app = app;
    this.axis = new ScreenAxis(() => app.state.get("view"), LEFT, RIGHT);
    this.places = this.#places();
    this.surface = new Surface(this.height, "Timeline of GPU work, ranges and API calls", (...parts) => this.#draw(...parts));
    this.element = this.surface.element;
    addGestures(app, this.surface, this.axis, {
      onClick: (x, y) => this.#click(x, y),
      onMove: (event, x, y) => this.#hover(event, x, y),
      onSelect: (x1, x2) => this.#select(x1, x2),
    });
  }

  /** Return the top of each row and of each heading, and set the height of the timeline. */
  #places() {
    const places = [];
    let top = AXIS;
    let group = null;
    for (const row of this.app.model.rows) {
      if (row.group !== group) {
        group = row.group;
        places.push({ heading: group, top });
        top += HEADING;
      }
      places.push({ row, top, height: HEIGHTS[row.source] });
      top += HEIGHTS[row.source] + GAP;
    }
    this.height = top + 6;
    return places;
  }

  /** Select the window between two x coordinates, or none if it is empty. */
  #select(x1, x2) {
    const { app, axis, surface } = this;
    const timeAt = (x) => Math.max(0, Math.min(app.model.duration, Math.round(axis.position(x, surface.width))));
    const ends = [timeAt(x1), timeAt(x2)];
    app.state.set({ window: ends[0] < ends[1] ? ends : null });
  }

  redraw() {
    this.surface.redraw();
  }

  #draw(context, width, height, colors) {
    const plotWidth = Math.max(1, width - LEFT - RIGHT);
    const tickTimes = this.#drawAxis(context, width, colors);
    const { scale } = this.surface;
    const [pixelWidth, pixelHeight] = [Math.max(1, Math.round(plotWidth * scale)), Math.max(1, Math.round((height - AXIS) * scale))];
    const image = context.createImageData(pixelWidth, pixelHeight);
    const painter = new Painter(image, this.app.state.get("view"));
    painter.drawBackground(pixelOf(context, colors.surface), pixelOf(context, colors.faint), tickTimes);
    const texts = [];
    const paint = this.#paints(context, colors);
    for (const { row, top, height: rowHeight } of this.places) {
      if (!row) continue;
      const rowTop = Math.round((top - AXIS) * scale);
      const bottom = Math.round((top - AXIS + rowHeight) * scale);
      painter.drawRow(row, rowTop, bottom, paint[row.source], (i, left, right) => {
        if (row.source !== "idle" && (right - left) / scale > 36 && texts.length < WIDEST_TEXTS) texts.push({ row, i, top, height: rowHeight, left: LEFT + left / scale, right: LEFT + right / scale });
      });
    }
    context.putImageData(image, Math.round(LEFT * scale), Math.round(AXIS * scale));
    this.#drawLabels(context, colors);
    this.#drawTexts(context, texts, colors);
    this.#drawSelection(context, width, height, colors);
  }

  /** Return for each kind of row a function from the index of a span to the color of its pixels. */
  #paints(context, colors) {
    const { state } = this.app;
    const key = [colors.ink, state.get("by"), state.get("group"), state.get("filter")].join("\n");
    if (key !== this.paintKey) this.paints = this.#newPaints(context, colors);
    this.paintKey = key;
    return this.paints;
  }

  #newPaints(context, colors) {
    const { app } = this;
    const { model } = app;
    const pixel = (color) => pixelOf(context, color);
    const dim = pixel(colors.line);
    const bands = [...colors.bands.map(pixel), pixel(colors.rest)];
    const picked = app.state.get("group");
    const ids = app.grouping.ids;
    const shades = new Uint32Array(model.signatures);
    for (let signature = 0; signature < model.signatures; signature++) {
      const isShown = (!app.mask || app.mask[signature]) && (picked < 0 || ids[signature] === picked);
      shades[signature] = isShown ? bands[app.bandOf(ids[signature])] : dim;
    }
    const { signature } = model.work;
    const callNames = model.arrays.call_name;
    const callShades = model.facts.names.map((name) => pixel(callColor(name, colors)));
    const rangeShades = [pixel(colors.reserved), pixel(colors.line)];
    const causes = model.facts.causes.map((_, cause) => pixel(colors.bands[causeBand(cause)]));
    return {
      work: (i) => shades[signature[i]],
      call: (i) => callShades[callNames[i]],
      range: (i) => rangeShades[i & 1],
      idle: (i) => causes[model.mainCause(i)],
    };
  }

  /** Draw the labels of the time axis, and return their times. */
  #drawAxis(context, width, colors) {
    const [first, last] = this.app.state.get("view");
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = colors.muted;
    const values = ticks(first, last, Math.max(2, (width - LEFT) / 110), 10);
    const step = values.length > 1 ? values[1] - values[0] : last - first;
    for (const value of values) {
      const x = this.axis.xOf(value, width);
      if (x > LEFT + 20 && x < width - 25) context.fillText(tickText(value, step), x, 9);
    }
    return values;
  }

  #drawLabels(context, colors) {
    context.textBaseline = "middle";
    for (const { heading, row, top, height } of this.places) {
      context.textAlign = heading === undefined ? "right" : "left";
      context.fillStyle = heading === undefined ? colors.muted : colors.ink;
      context.font = `${heading === undefined ? 11 : 12}px system-ui, sans-serif`;
      if (heading !== undefined) context.fillText(heading, 2, top + HEADING / 2 + 1);
      else context.fillText(fitted(context, row.label, LEFT - 12), LEFT - 8, top + height / 2);
    }
  }

  #drawTexts(context, texts, colors) {
    const { model } = this.app;
    context.textAlign = "left";
    context.font = "11px system-ui, sans-serif";
    for (const { row, i, top, height, left, right } of texts) {
      const index = row.indices[i];
      const name = row.source === "work" ? shortName(model.nameOfWork(index)) : row.source === "call" ? model.nameOfCall(index) : model.nameOfRange(index);
      const start = Math.max(left, LEFT);
      context.fillStyle = row.source === "work" ? textColor(context, this.app.colorOfWork(index, colors)) : colors.ink;
      context.fillText(fitted(context, name, right - start - 8), start + 4, top + height / 2 + 0.5);
    }
  }

  #drawSelection(context, width, height, colors) {
    const { state, model } = this.app;
    const inside = (time) => Math.min(Math.max(this.axis.xOf(time, width), LEFT), width - RIGHT);
    const selected = state.get("window");
    if (selected) {
      const [from, to] = selected.map(inside);
      context.fillStyle = colors.accent;
      context.globalAlpha = 0.13;
      context.fillRect(from, AXIS - 6, to - from, height);
      context.globalAlpha = 1;
      context.fillRect(from, AXIS - 6, 1.5, height);
      context.fillRect(to - 1.5, AXIS - 6, 1.5, height);
    }
    const picked = this.app.picked();
    if (!picked) return;
    this.#outline(context, picked, inside, colors);
    const linked = picked.source === "work" ? ["call", model.work.call[picked.index]] : ["work", picked.source === "call" ? model.workOfCall[picked.index] : -1];
    if (linked[1] < 0) return;
    const partner = { source: linked[0], index: linked[1] };
    this.#outline(context, partner, inside, colors);
    this.#arrow(context, picked.source === "call" ? [picked, partner] : [partner, picked], width, colors);
  }

  #placeOf({ source, index }) {
    const row = this.app.model.rows[this.#spans(source).row[index] - 1];
    return this.places.find((place) => place.row === row);
  }

  #spans(source) {
    const { model } = this.app;
    return { work: model.work, call: model.calls, range: model.ranges, idle: model.idle }[source];
  }

  #outline(context, item, inside, colors) {
    const place = this.#placeOf(item);
    if (!place) return;
    const spans = this.#spans(item.source);
    const [first, last] = this.app.state.get("view");
    if (spans.end[item.index] < first || spans.start[item.index] > last) return;
    const [left, right] = [inside(spans.start[item.index]), inside(spans.end[item.index])];
    context.strokeStyle = colors.ink;
    context.lineWidth = 2;
    context.strokeRect(left - 1, place.top - 1, Math.max(right - left, 1) + 2, place.height + 2);
  }

  /** Draw an arrow from an API call to the work that it started. */
  #arrow(context, [call, work], width, colors) {
    const [from, to] = [this.#placeOf(call), this.#placeOf(work)];
    if (!from || !to) return;
    const [x1, x2] = [this.axis.xOf(this.app.model.calls.start[call.index], width), this.axis.xOf(this.app.model.work.start[work.index], width)];
    if (Math.min(x1, x2) > width - RIGHT || Math.max(x1, x2) < LEFT) return;
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT, this.height);
    context.clip();
    context.strokeStyle = colors.ink;
    context.lineWidth = 1.2;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(x1, from.top);
    context.lineTo(x2, to.top + to.height);
    context.stroke();
    context.restore();
  }

  /** Return the span at a position, or null. */
  spanAt(x, y) {
    const place = this.places.find(({ row, top, height }) => row && y >= top - 1 && y < top + height + 2);
    if (!place || x < LEFT - NEAR) return null;
    const { width } = this.surface;
    const distance = this.axis.position(x + NEAR, width) - this.axis.position(x, width);
    const i = place.row.at(this.axis.position(x, width), distance);
    return i < 0 ? null : { source: place.row.source, index: place.row.indices[i] };
  }

  #click(x, y) {
    const span = this.spanAt(x, y);
    if (span?.source === "range" || span?.source === "idle") {
      const spans = this.#spans(span.source);
      this.app.state.set({ pick: "", window: [spans.start[span.index], Math.max(spans.end[span.index], spans.start[span.index] + 1)] });
    } else this.app.state.set({ pick: span ? `${span.source}${span.index}` : "", ...(span ? {} : { window: null, group: -1 }) });
  }

  #hover(event, x, y) {
    const span = this.spanAt(x, y);
    if (!span) return this.app.tooltip.hide();
    const spans = this.#spans(span.source);
    const times = `${formatNanoseconds(spans.duration[span.index])}, from ${formatTime(spans.start[span.index])}`;
    this.app.tooltip.show(event, [...this.app.describe(span), times]);
  }

  /** Return the share of time that the spans of a row cover in each of `columns` equal parts of the view. */
  coverage(row, columns) {
    const [first, last] = this.app.state.get("view");
    const edge = (column) => first + ((last - first) * column) / columns;
    return Array.from({ length: columns }, (_, column) => (row.coveredUntil(edge(column + 1)) - row.coveredUntil(edge(column))) / (edge(column + 1) - edge(column)));
  }
}

/**
 * Paints rows pixel by pixel. The time for a row depends on its width in pixels, and not on the number of its spans:
 * spans that are wider than a pixel are painted one by one; narrower spans of one pixel are found by binary search,
 * and the height of their bar is the share of time that they cover.
 */
class Painter {
  constructor(image, [first, last]) {
    this.pixels = new Uint32Array(image.data.buffer);
    this.width = image.width;
    this.first = first;
    this.perPixel = (last - first) / image.width;
  }

  /** Fill the image, and paint a line at each of some times. */
  drawBackground(color, lineColor, times) {
    this.pixels.fill(color);
    for (const time of times) {
      const x = Math.floor((time - this.first) / this.perPixel);
      if (x >= 0 && x < this.width) for (let i = x; i < this.pixels.length; i += this.width) this.pixels[i] = lineColor;
    }
  }

  /** Paint a row; `onSpan` is called with each span that is wider than some pixels. */
  drawRow(row, top, bottom, colorOf, onSpan) {
    const { first, perPixel, width } = this;
    const { start, end, sums, count, indices } = row;
    let i = firstAtLeast(end, first);
    let column = 0;
    let perColumn = 1; // number of spans in the last narrow column
    while (i < count && column < width) {
      const left = Math.max(column, (start[i] - first) / perPixel);
      if (left >= width) return;
      const right = (end[i] - first) / perPixel;
      column = Math.floor(left);
      if (right - left >= 2) {
        const [from, to] = [Math.round(left), Math.min(width, Math.round(right))];
        this.#fill(from, to - from > 3 ? to - 1 : to, top, bottom, colorOf(indices[i]));
        if (to - from > 12) onSpan(i, from, to);
        column = Math.max(to, column + 1);
        i++;
        continue;
      }
      const edge = first + (column + 1) * perPixel;
      const next = Math.max(firstAtLeastNear(start, edge, i, perColumn), i + 1);
      perColumn = next - i;
      const covered = sums[next] - sums[i] - Math.max(0, edge - perPixel - start[i]) - Math.max(0, end[next - 1] - edge);
      const height = Math.max(2, Math.round((bottom - top) * Math.min(1, covered / perPixel)));
      this.#fill(column, column + 1, bottom - Math.min(height, bottom - top), bottom, colorOf(indices[longest(start, end, i, next)]));
      // The last span of this pixel may continue in the next pixel.
      i = end[next - 1] > edge ? next - 1 : next;
      column++;
    }
  }

  #fill(from, to, top, bottom, color) {
    const { pixels, width } = this;
    for (let y = top * width; y < bottom * width; y += width) for (let i = y + from; i < y + to; i++) pixels[i] = color;
  }
}

/** Return the index of the first item at or after index `from` that is at least a value; it is likely near `from + guess`. */
function firstAtLeastNear(sorted, value, from, guess) {
  let low = from;
  let step = Math.max(1, guess >> 3);
  let high = Math.min(sorted.length, from + guess);
  if (high < sorted.length && sorted[high] < value) {
    while (high < sorted.length && sorted[high] < value) {
      low = high + 1;
      high = Math.min(sorted.length, high + step);
      step *= 2;
    }
  } else {
    while (high - step > from && sorted[high - step] >= value) {
      high -= step;
      step *= 2;
    }
    low = Math.max(from, high - step);
  }
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return the index of the longest of up to eight spans between two indices. */
function longest(start, end, from, to) {
  const step = Math.max(1, Math.floor((to - from) / 8));
  let best = from;
  for (let i = from; i < to; i += step) if (end[i] - start[i] > end[best] - start[best]) best = i;
  return best;
}

/** Return the color of a cause of idle time, as a number of a band. The largest kernels have the first bands. */
export function causeBand(cause) {
  return BAND_COLORS - 1 - (cause % BAND_COLORS);
}

/** Return the color of an API call: waits and allocations stand out from launches. */
function callColor(name, colors) {
  if (/Synchronize|Query/.test(name)) return colors.accent;
  if (/Malloc|MemAlloc|MemFree|cudaFree|MemCreate|MemMap/.test(name)) return colors.error;
  return colors.rest;
}

/** Return black or white, whichever is easier to read on a color. */
function textColor(context, color) {
  const pixel = pixelOf(context, color);
  const [red, green, blue] = [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
  return 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#111" : "#fff";
}

/** Return a kernel's name without return type, namespaces and arguments: "vectorized_elementwise_kernel<4, …>". */
export function shortName(name) {
  if (/^Mem(cpy|set) /.test(name)) return name;
  const declaration = name.replace(/^void /, "").replaceAll("(anonymous namespace)::", "");
  return declaration.split("(", 1)[0].replace(/\b\w+::/g, "") || name;
}
