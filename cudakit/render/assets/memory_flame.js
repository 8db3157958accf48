// The flame graph of memory: width is bytes, calls are below their callers.

import { Surface, fitted, formatBytes, formatShare, make } from "./canvas.js";

const ROW = 19;
const MOST_ROWS = 60;
const NARROWEST = 0.5; // pixels
export const FLAME_KINDS = { cursor: "in use at the cursor", window: "allocated in the brushed window", growth: "growth over the brushed window" };

export class FlameView {
  constructor(app) {
    this.app = app;
    this.surface = new Surface(420, "Flame graph of memory", (...parts) => this.#draw(...parts));
    const choices = Object.entries(FLAME_KINDS).map(([value, text]) => make("option", { value }, text));
    this.choice = make("select", { "aria-label": "What the flame graph shows", onchange: () => app.state.set({ flame: this.choice.value }) }, ...choices);
    this.title = make("span", { class: "muted" });
    this.element = make("div", {}, make("div", { class: "view-bar" }, this.choice, this.title), this.surface.element);
    this.root = 0;
    this.boxes = [];
    const { canvas } = this.surface;
    canvas.addEventListener("click", (event) => this.#click(event));
    canvas.addEventListener("pointermove", (event) => this.#hover(event));
    canvas.addEventListener("pointerleave", () => app.tooltip.hide());
  }

  redraw(changed) {
    if (changed && this.tree && !["cursor", "brush", "filter", "flame"].some((name) => changed.has(name))) return;
    const { model, state, mask } = this.app;
    const kind = state.get("flame");
    const window = state.get("brush") || [-1, model.events - 1];
    this.choice.value = kind;
    let bytes;
    if (kind === "window") bytes = model.stackBytesAllocated(window[0], window[1], mask);
    else if (kind === "growth") {
      const before = model.stackBytesAt(window[0], mask);
      bytes = model.stackBytesAt(window[1], mask).map((after, stack) => Math.max(after - before[stack], 0));
    } else bytes = model.stackBytesAt(state.get("cursor"), mask);
    this.tree = model.treeBytes(bytes);
    if (!this.tree.total[this.root]) this.root = 0;
    this.title.textContent = `${formatBytes(this.tree.total[0])}; click a frame to enlarge it, the top row to go back`;
    this.#drawTree();
  }

  #drawTree() {
    this.boxes = [];
    if (this.tree.total[this.root]) this.#place(this.root, 0, 0, this.surface.element.clientWidth || 800);
    this.surface.height = Math.max(8, ...this.boxes.map((box) => box.top / ROW + 1)) * ROW;
    this.surface.redraw();
  }

  /** Add the boxes of a node and of its descendants that are wide enough to see. */
  #place(node, depth, left, width) {
    this.boxes.push({ node, left, top: depth * ROW, width });
    if (depth + 1 >= MOST_ROWS) return;
    const perByte = width / this.tree.total[node];
    let x = left;
    for (const child of this.app.model.childrenOf(node, this.tree.total)) {
      const wide = this.tree.total[child] * perByte;
      if (wide < NARROWEST) break;
      this.#place(child, depth + 1, x, wide);
      x += wide;
    }
  }

  #draw(context, width, height, colors) {
    context.textBaseline = "middle";
    context.textAlign = "left";
    if (!this.boxes.length) {
      context.fillStyle = colors.muted;
      context.fillText("No memory.", 8, 20);
    }
    for (const box of this.boxes) this.#drawBox(context, box, colors);
  }

  #drawBox(context, { node, left, top, width }, colors) {
    const text = node ? this.app.model.frameTexts[this.app.model.arrays.node_frame[node]] : "all memory";
    context.fillStyle = node ? colors.bands[hashOf(text) % colors.bands.length] : colors.line;
    context.globalAlpha = 0.55;
    context.fillRect(left, top, Math.max(width - 1, 0.5), ROW - 1);
    context.globalAlpha = 1;
    context.fillStyle = colors.ink;
    if (width > 24) context.fillText(fitted(context, text, width - 8), left + 4, top + ROW / 2);
  }

  #boxAt(event) {
    const [x, y] = this.surface.at(event);
    return this.boxes.find((box) => box.left <= x && x < box.left + box.width && box.top <= y && y < box.top + ROW);
  }

  #click(event) {
    const box = this.#boxAt(event);
    if (!box) return;
    const parent = this.app.model.arrays.node_parent;
    this.root = box.node === this.root ? parent[this.root] : box.node;
    this.#drawTree();
  }

  #hover(event) {
    const box = this.#boxAt(event);
    if (!box) return this.app.tooltip.hide();
    const { total, own } = this.tree;
    const [name, file, line] = box.node ? this.app.model.facts.frames[this.app.model.arrays.node_frame[box.node]] : ["all memory", "", 0];
    const lines = [name, `total ${formatBytes(total[box.node])} (${formatShare(total[box.node] / total[0])}) · own ${formatBytes(own[box.node])}`];
    if (file) lines.splice(1, 0, line ? `${file}:${line}` : file);
    this.app.tooltip.show(event, lines);
  }
}

function hashOf(text) {
  let hash = 0;
  for (let i = 0; i < text.length; i++) hash = (hash * 31 + text.charCodeAt(i)) >>> 0;
  return hash;
}
