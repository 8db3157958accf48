// The memory page: loads the data, and lets all views share one cursor, one selection and one filter.

import { BAND_COLORS, Tooltip, formatBytes, formatCount, formatMicroseconds, make } from "./canvas.js";
import { drawExplorers } from "./explorer.js";
import { FLAME_KINDS, FlameView } from "./memory_flame.js";
import { LayoutView } from "./memory_layout.js";
import { DetailsView, EventsView, HoldersView } from "./memory_lists.js";
import { MapView } from "./memory_map.js";
import { Bands, MemoryModel } from "./memory_model.js";
import { TimeView } from "./memory_time.js";
import { PageState, choiceReader, numberReader, rangeReader } from "./page_state.js";

const GROUPINGS = { stack: "call stack", line: "line of code", category: "category", range: "annotation", pool: "pool", stream: "stream" };
const TABS = { map: "Address map", layout: "Segments", flame: "Flame graph", holders: "Memory by group", events: "Events" };
const SHORTEST_VIEW = 8; // events

class MemoryExplorer {
  constructor(model, element, prefix) {
    this.model = model;
    this.tooltip = new Tooltip();
    const last = Math.max(model.events, 1);
    this.state = new PageState(
      { cursor: model.facts.shown_event, view: [-1, last], brush: null, by: "stack", tab: "map", group: -1, allocation: -1, filter: "", flame: "cursor" },
      {
        cursor: numberReader(-1, model.events - 1),
        view: rangeReader(-1, last),
        brush: rangeReader(-1, model.events - 1),
        by: choiceReader(Object.keys(GROUPINGS)),
        tab: choiceReader(Object.keys(TABS)),
        group: numberReader(-1, 2 ** 31),
        allocation: numberReader(-1, model.count - 1),
        filter: (text) => text.slice(0, 200),
        flame: choiceReader(Object.keys(FLAME_KINDS)),
      },
      prefix,
    );
    this.#updateGroups();
    this.time = new TimeView(this);
    this.views = { map: new MapView(this), layout: new LayoutView(this), flame: new FlameView(this), holders: new HoldersView(this), events: new EventsView(this) };
    this.details = new DetailsView(this);
    this.#build(element);
    this.state.listen((changed) => this.#update(changed));
    this.#update(null);
  }

  #build(element) {
    const options = Object.entries(GROUPINGS).map(([value, text]) => make("option", { value }, text));
    this.by = make("select", { onchange: () => this.state.set({ by: this.by.value, group: -1 }) }, ...options);
    this.filter = make("input", { type: "search", placeholder: "function, file or line", oninput: () => this.state.set({ filter: this.filter.value.slice(0, 200), group: -1 }) });
    this.tabs = Object.entries(TABS).map(([tab, text]) =>
      make("button", { type: "button", role: "tab", id: `tab-${tab}`, onclick: () => this.state.set({ tab }) }, text),
    );
    this.legend = make("ul", { class: "legend" });
    this.body = make("div", { class: "view", role: "tabpanel" });
    element.replaceChildren(
      make(
        "div",
        { class: "toolbar" },
        make("label", {}, "color by ", this.by),
        make("label", {}, "only stacks with ", this.filter),
        make("button", { type: "button", onclick: () => this.showAll() }, "show all events"),
        make("button", { type: "button", onclick: () => this.state.set({ cursor: this.model.facts.peak_event }) }, "go to the peak"),
        make("span", { class: "muted" }, "wheel: zoom · drag: select a window · shift and drag: move · ← →: one event"),
      ),
      make(
        "div",
        { class: "panes" },
        make("div", {}, this.time.element, this.legend, make("div", { class: "tabs", role: "tablist" }, ...this.tabs), this.body),
        this.details.element,
      ),
      make("p", { class: "caption" }, this.#caption()),
      this.tooltip.element,
    );
    element.addEventListener("keydown", (event) => this.#moveCursor(event));
  }

  #caption() {
    const { device, events, first_us: first, has_times: timed } = this.model.facts;
    const date = timed && first > 0 && first < 8e15 ? `, recorded ${new Date(first / 1000).toISOString().slice(0, 19).replace("T", " ")} UTC` : "";
    return `${device}, ${formatCount(events)} events${date}. Curves: reserved (solid), allocated (dashed), requested (dotted).`;
  }

  /** Compute the groups and their bands after a change of the filter or the grouping. */
  #updateGroups() {
    this.mask = this.model.stacksWith(this.state.get("filter"));
    this.grouping = this.model.grouping(this.state.get("by"));
    this.bands = new Bands(this.model, this.grouping, this.mask, BAND_COLORS);
  }

  /** Draw the changed views now, instead of before the next frame. */
  redraw() {
    this.state.notify();
  }

  /** Redraw after changes of the state. `changed` has the names of changed values; null means all values. */
  #update(changed) {
    if (!changed || changed.has("filter") || changed.has("by")) {
      this.#updateGroups();
      this.by.value = this.state.get("by");
      if (this.filter.value !== this.state.get("filter")) this.filter.value = this.state.get("filter");
      this.legend.replaceChildren(...this.bands.names.map((name, band) => this.#legendItem(name, band)));
    }
    const tab = this.state.get("tab");
    const view = this.views[tab];
    if (!changed || changed.has("tab")) {
      this.body.replaceChildren(view.element);
      for (const button of this.tabs) button.setAttribute("aria-selected", String(button.id === `tab-${tab}`));
      view.redraw(null);
    } else view.redraw(changed);
    this.time.redraw();
    this.details.redraw();
  }

  #legendItem(name, band) {
    const id = this.bands.ids[band];
    const swatch = make("span", { class: `swatch band${id === undefined ? "-rest" : band}` });
    return make("li", { title: name, onclick: () => id !== undefined && this.pickGroup(this.state.get("group") === id ? -1 : id) }, swatch, name);
  }

  #moveCursor(event) {
    if (event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement) return;
    const cursor = this.state.get("cursor");
    const [first, last] = this.state.get("view");
    const step = event.shiftKey ? Math.max(1, Math.round((last - first) / 50)) : 1;
    const moves = { ArrowLeft: -step, ArrowRight: step };
    if (event.key in moves) this.state.set({ cursor: Math.max(-1, Math.min(this.model.events - 1, cursor + moves[event.key])) });
    else if (event.key === "+" || event.key === "=") this.zoom(cursor, 0.7);
    else if (event.key === "-") this.zoom(cursor, 1.4);
    else if (event.key === "0") this.showAll();
    else if (event.key === "Home") this.state.set({ cursor: -1 });
    else if (event.key === "End") this.state.set({ cursor: this.model.events - 1 });
    else if (event.key === "Escape") this.state.set({ brush: null, group: -1, allocation: -1, filter: "" });
    else return;
    event.preventDefault();
  }

  /** Show `length` events from event `first`, limited to the trace. */
  show(first, length) {
    const end = Math.max(this.model.events, 1);
    const visible = Math.max(SHORTEST_VIEW, Math.min(Math.round(length), end + 1));
    const from = Math.max(-1, Math.min(Math.round(first), end - visible));
    this.state.set({ view: [from, from + visible] });
  }

  showAll() {
    this.show(-1, this.model.events + 1);
  }

  /** Multiply the number of visible events by a factor; the event `center` stays at the same pixel. */
  zoom(center, factor) {
    const [first, last] = this.state.get("view");
    const length = Math.max(SHORTEST_VIEW, (last - first) * factor);
    this.show(center - ((center - first) * length) / (last - first), length);
  }

  /** Move the view by a share of the visible events. */
  pan(share) {
    const [first, last] = this.state.get("view");
    this.show(first + share * (last - first), last - first);
  }

  /** Pick an allocation, or none (-1), and set the cursor. */
  pick(allocation, cursor = this.state.get("cursor")) {
    this.state.set({ allocation, cursor });
  }

  pickGroup(group) {
    this.state.set({ group });
  }

  /** Return the band of the picked group, or null if no group is picked. */
  pickedBand() {
    const group = this.state.get("group");
    if (group < 0) return null;
    const band = this.bands.ids.indexOf(group);
    return band < 0 ? this.bands.ids.length : band;
  }

  swatch(id) {
    const band = this.bands.ids.indexOf(id);
    return make("span", { class: `swatch band${band < 0 ? "-rest" : band}` });
  }

  eventLabel(event) {
    if (event < 0) return "before the first event";
    const { facts, arrays } = this.model;
    const time = facts.has_times ? `, +${formatMicroseconds(arrays.time_us[event])}` : "";
    return `event ${formatCount(event)}${time}`;
  }

  /** Return lines that describe an allocation. */
  describe(i) {
    const { model } = this;
    const end = model.end[i] >= model.events ? "never freed" : `freed at event ${formatCount(model.end[i])}`;
    const begin = model.begin[i] < 0 ? "allocated before the trace" : `allocated at event ${formatCount(model.begin[i])}`;
    return [`${formatBytes(model.requested[i])}, ${begin}, ${end}`, ...model.stackFrames(model.arrays.stack[i]).slice(0, 6)];
  }
}

drawExplorers("memory", (views, arrays, facts, index) => {
  const model = new MemoryModel(arrays, facts);
  if (!model.events) throw new Error("the trace has no events");
  return new MemoryExplorer(model, views, index ? `${index + 1}.` : "");
});
