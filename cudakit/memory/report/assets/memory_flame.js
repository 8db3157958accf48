// The flame graph tab: memory in use at an event, or the changes over the selected window.

import { formatBytes, make } from "./canvas.js";
import { FlameGraph } from "./flame.js";

export const FLAME_KINDS = {
  cursor: "in use at the cursor",
  peak: "in use at the peak",
  windowPeak: "in use at the peak of the selected window",
  window: "allocated in the selected window",
  growth: "growth over the selected window",
};

export class FlameView {
  constructor(app) {
    this.app = app;
    this.graph = new FlameGraph(app.model.tree, app.tooltip);
    const choices = Object.entries(FLAME_KINDS).map(([value, text]) => make("option", { value }, text));
    this.choice = make("select", { "aria-label": "What the flame graph shows", onchange: () => app.state.set({ flame: this.choice.value }) }, ...choices);
    this.title = make("span", { class: "muted" });
    this.element = make("div", {}, make("div", { class: "view-bar" }, this.choice, this.title), this.graph.element);
  }

  redraw(changed) {
    if (changed && this.graph.selfAmounts && !["cursor", "brush", "filter", "flame"].some((name) => changed.has(name))) return;
    const kind = this.app.state.get("flame");
    this.choice.value = kind;
    this.graph.show(this.app.model.selfBytes(this.#stackBytes(kind)));
    this.title.textContent = `${formatBytes(this.graph.total[0])}; click a frame to enlarge it, the top row to go back`;
  }

  /** Return the bytes of each stack. If no window is selected, the window is the whole trace. */
  #stackBytes(kind) {
    const { model, state, mask } = this.app;
    const [first, last] = state.get("brush") || [-1, model.events - 1];
    if (kind === "window") return model.stackBytesAllocated(first, last, mask);
    if (kind === "cursor") return model.stackBytesAt(state.get("cursor"), mask);
    if (kind === "peak") return model.stackBytesAt(model.facts.peak_event, mask);
    if (kind === "windowPeak") return model.stackBytesAt(model.peakBetween(first, last), mask);
    const before = model.stackBytesAt(first, mask);
    return model.stackBytesAt(last, mask).map((after, stack) => Math.max(after - before[stack], 0));
  }
}
