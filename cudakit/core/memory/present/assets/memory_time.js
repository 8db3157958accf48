// The chart of memory over time: stacked bands, curves, markers, ranges, the cursor and the selected window.

import { Surface, fitted, formatBytes, formatCount, pixelOf, ticks } from "./canvas.js";
import { CurveSampler } from "./memory_model.js";

// Width of the labels of the y axis, space above the plot, height of the x axis and height of a lane, in pixels.
const LEFT = 72;
const TOP = 8;
const AXIS = 22;
const LANE = 16;
const MOST_LANES = 6;
const CURVES = ["reserved", "active", "allocated", "requested"];

/** The x axis of all views over time: converts events to pixels, and pixels to events. */
export class TimeScale {
  constructor(state, left = LEFT, right = 8) {
    this.state = state;
    this.left = left;
    this.right = right;
  }

  x(event, width) {
    const [first, last] = this.state.get("view");
    return this.left + ((event - first) / (last - first)) * (width - this.left - this.right);
  }

  event(x, width) {
    const [first, last] = this.state.get("view");
    return first + ((x - this.left) / (width - this.left - this.right)) * (last - first);
  }
}

/** Add gestures to a view over time: the wheel zooms, dragging moves or brushes, and a click sets the cursor. */
export function addTimeGestures(app, surface, scale, { onClick, onMove, brush }) {
  const { canvas } = surface;
  const clamp = (event) => Math.max(-1, Math.min(app.model.events - 1, Math.round(event)));
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const [x] = surface.position(event);
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) app.pan((event.deltaX / surface.width) * 0.5);
      else app.zoom(scale.event(x, surface.width), Math.exp(event.deltaY * 0.0015));
    },
    { passive: false },
  );
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    const [x] = surface.position(event);
    drag = { x, view: app.state.get("view"), moved: false, brushing: brush && !event.shiftKey };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = surface.position(event);
    if (!drag) return onMove(event, x, y);
    if (Math.abs(x - drag.x) < 4 && !drag.moved) return;
    drag.moved = true;
    if (drag.brushing) {
      const ends = [scale.event(drag.x, surface.width), scale.event(x, surface.width)].sort((a, b) => a - b).map(clamp);
      app.state.set({ brush: ends[0] < ends[1] ? ends : null });
    } else {
      const [first, last] = drag.view;
      app.show(first + ((drag.x - x) / surface.width) * (last - first), last - first);
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = surface.position(event);
    if (drag && !drag.moved) onClick(clamp(scale.event(x, surface.width)), x, y);
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => app.tooltip.hide());
  canvas.addEventListener("dblclick", () => app.showAll());
}

export class TimeView {
  constructor(app) {
    this.app = app;
    this.scale = new TimeScale(app.state);
    this.lanes = lanesOf(app.model);
    this.plotHeight = 230;
    const height = TOP + this.plotHeight + AXIS + this.lanes.length * LANE;
    this.surface = new Surface(height, "Memory over time", (...parts) => this.#draw(...parts));
    this.element = this.surface.element;
    this.curves = Object.fromEntries(CURVES.map((name) => [name, new CurveSampler(app.model.curves[name])]));
    addTimeGestures(app, this.surface, this.scale, {
      brush: true,
      onClick: (event) => app.state.set({ cursor: event, brush: null }),
      onMove: (event, x, y) => this.#hover(event, x, y),
    });
  }

  redraw() {
    this.surface.redraw();
  }

  #draw(context, width, height, colors) {
    const [first, last] = this.app.state.get("view");
    const columns = Math.max(1, Math.floor(width - this.scale.left - this.scale.right));
    const reserved = this.curves.reserved.sample(first, last, columns);
    const bands = this.app.bands.sample(first, last, columns);
    this.top = Math.max(1, this.#highest(reserved, bands)) * 1.04;
    this.sampled = { bands, columns };
    this.#drawBands(context, bands, columns, colors);
    this.#drawAxis(context, width, colors);
    for (const [name, dash] of [["reserved", []], ["allocated", [5, 3]], ["requested", [1, 3]]]) {
      const values = name === "reserved" ? reserved : this.curves[name].sample(first, last, columns);
      this.#drawCurve(context, values, name === "reserved" ? colors.muted : colors.ink, dash);
    }
    this.#drawMarkers(context, width, colors);
    this.#drawLanes(context, width, colors);
    this.#drawCursor(context, width, height, colors);
  }

  /** Return the highest of the reserved bytes and the sums of the bands. */
  #highest(reserved, bands) {
    let highest = 0;
    for (const value of reserved) highest = Math.max(highest, value);
    const count = this.app.bands.names.length;
    for (let column = 0; column * count < bands.length; column++) {
      let total = 0;
      for (let band = 0; band < count; band++) total += bands[column * count + band];
      highest = Math.max(highest, total);
    }
    return highest;
  }

  #y(bytes) {
    return TOP + this.plotHeight * (1 - bytes / this.top);
  }

  #drawAxis(context, width, colors) {
    context.globalAlpha = 1;
    const [first, last] = this.app.state.get("view");
    const bottom = TOP + this.plotHeight;
    context.lineWidth = 1;
    context.strokeStyle = colors.line;
    context.fillStyle = colors.muted;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of ticks(0, this.top, 5, 2)) {
      const y = Math.round(this.#y(value)) + 0.5;
      context.beginPath();
      context.moveTo(this.scale.left, y);
      context.lineTo(width - this.scale.right, y);
      context.stroke();
      context.fillText(formatBytes(value), this.scale.left - 8, y);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const value of ticks(first, last, Math.max(2, width / 130), 10)) {
      if (Number.isInteger(value)) context.fillText(formatCount(value), this.scale.x(value, width), bottom + 6);
    }
  }

  /** Draw the bands pixel by pixel, which is many times faster than drawing rectangles. */
  #drawBands(context, bands, columns, colors) {
    const scale = this.surface.scale;
    const pixelColumns = Math.round(columns * scale);
    const pixelRows = Math.round(this.plotHeight * scale);
    const image = context.createImageData(pixelColumns, pixelRows);
    const pixels = new Uint32Array(image.data.buffer).fill(pixelOf(context, colors.surface));
    const count = this.app.bands.names.length;
    const picked = this.app.pickedBand();
    const dim = pixelOf(context, colors.line);
    const shades = Array.from({ length: count }, (_, band) => {
      if (picked !== null && picked !== band) return dim;
      return pixelOf(context, band === count - 1 ? colors.rest : colors.bands[band % colors.bands.length]);
    });
    for (let x = 0; x < pixelColumns; x++) {
      const column = Math.min(columns - 1, Math.floor(x / scale));
      let total = 0;
      let bottom = pixelRows;
      for (let band = 0; band < count; band++) {
        total += bands[column * count + band];
        const top = Math.max(0, Math.round(pixelRows * (1 - total / this.top)));
        for (let y = top; y < bottom; y++) pixels[y * pixelColumns + x] = shades[band];
        bottom = Math.min(bottom, top);
      }
    }
    context.putImageData(image, Math.round(this.scale.left * scale), Math.round(TOP * scale));
  }

  #drawCurve(context, values, color, dash) {
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.setLineDash(dash);
    context.beginPath();
    for (let column = 0; column < values.length; column++) {
      const y = this.#y(values[column]);
      if (column) context.lineTo(this.scale.left + column, y);
      context.lineTo(this.scale.left + column + 1, y);
    }
    context.stroke();
    context.setLineDash([]);
  }

  #drawMarkers(context, width, colors) {
    const { oom_event: failures } = this.app.model.arrays;
    const labelPositions = []; // x coordinates of the labels, in pixels
    const drawMarker = (event, color, text) => {
      const x = this.scale.x(event, width);
      if (x < this.scale.left || x > width - this.scale.right) return;
      context.strokeStyle = context.fillStyle = color;
      context.setLineDash([4, 3]);
      context.beginPath();
      context.moveTo(x, TOP);
      context.lineTo(x, TOP + this.plotHeight);
      context.stroke();
      context.setLineDash([]);
      if (labelPositions.some((position) => Math.abs(position - x) < 100)) return;
      labelPositions.push(x);
      context.textAlign = x > width - 110 ? "right" : "left";
      context.textBaseline = "top";
      context.fillText(text, x + (x > width - 110 ? -4 : 4), TOP);
    };
    const markers = [
      ...Array.from(failures.slice(-20), (event) => ({ event, color: colors.error, text: "out of memory" })),
      ...this.app.model.facts.snapshots.slice(-20).map((event) => ({ event, color: colors.muted, text: "snapshot" })),
    ];
    for (const { event, color, text } of markers) drawMarker(event, color, text);
  }

  #drawLanes(context, width, colors) {
    context.textBaseline = "middle";
    context.textAlign = "left";
    this.lanes.forEach((lane, index) => {
      const top = TOP + this.plotHeight + AXIS + index * LANE;
      let drawnUntil = -1;
      for (const { first, last, name } of lane) {
        const x = Math.max(this.scale.x(first, width), this.scale.left);
        const end = Math.min(this.scale.x(last, width), width - this.scale.right);
        if (end <= x || end < drawnUntil) continue;
        drawnUntil = Math.max(end, x + 1);
        context.fillStyle = colors.faint;
        context.fillRect(x, top, Math.max(end - x - 1, 1), LANE - 2);
        context.fillStyle = colors.muted;
        context.fillText(fitted(context, name, end - x - 6), x + 3, top + LANE / 2);
      }
    });
  }

  #drawCursor(context, width, height, colors) {
    const { state } = this.app;
    const drawLine = (event) => {
      const x = this.scale.x(event, width);
      if (x < this.scale.left || x > width - this.scale.right) return;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height);
      context.stroke();
    };
    const brush = state.get("brush");
    if (brush) {
      const [from, to] = brush.map((event) => Math.min(Math.max(this.scale.x(event, width), this.scale.left), width - this.scale.right));
      context.fillStyle = colors.accent;
      context.globalAlpha = 0.16;
      context.fillRect(from, TOP, to - from, this.plotHeight);
      context.globalAlpha = 1;
    }
    context.strokeStyle = colors.accent;
    context.lineWidth = 2;
    drawLine(state.get("cursor"));
  }

  #hover(event, x, y) {
    const { app } = this;
    const width = this.surface.width;
    const pointedEvent = Math.max(-1, Math.min(app.model.events - 1, Math.round(this.scale.event(x, width))));
    const totals = ["reserved", "active", "requested"].map((name) => `${name} ${formatBytes(app.model.curves[name][pointedEvent + 1])}`);
    const lines = [app.eventLabel(pointedEvent), totals.join(" · ")];
    const band = this.#bandAt(x, y);
    if (band !== null) lines.push(`${app.bands.names[band.band]}: ${formatBytes(band.bytes)}`);
    const lane = this.lanes[Math.floor((y - TOP - this.plotHeight - AXIS) / LANE)];
    const range = lane?.find(({ first, last }) => first <= pointedEvent && pointedEvent < last);
    if (range) lines.push(`range ${range.name}`);
    app.tooltip.show(event, lines);
  }

  /** Return the band at a position and its bytes, or null. */
  #bandAt(x, y) {
    const column = Math.floor(x - this.scale.left);
    if (!this.sampled || column < 0 || column >= this.sampled.columns) return null;
    const count = this.app.bands.names.length;
    let total = 0;
    for (let band = 0; band < count; band++) {
      const bytes = this.sampled.bands[column * count + band];
      total += bytes;
      if (bytes > 0 && this.#y(total) <= y && y <= this.#y(total - bytes)) return { band, bytes };
    }
    return null;
  }
}

/** Return the annotations in lanes, one lane for each nesting depth; the outermost lane is first. */
function lanesOf(model) {
  const lanes = [];
  for (const [first, last, depth, name] of model.facts.ranges) {
    if (depth >= MOST_LANES) continue;
    while (lanes.length <= depth) lanes.push([]);
    lanes[depth].push({ first, last, name: model.facts.range_names[name] });
  }
  return lanes;
}
