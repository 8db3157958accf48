// The difference between two snapshots as two flame graphs: call stacks whose memory grew, and those whose memory shrank.

import { Tooltip, formatBytes, make } from "./canvas.js";
import { drawExplorers } from "./explorer.js";
import { CallTree, FlameGraph } from "./flame.js";
import { PageState, choiceReader } from "./page_state.js";

const MOMENTS = { peak: "at the peaks", end: "at the ends" };

class DifferenceView {
  constructor(element, arrays, facts, prefix) {
    this.arrays = arrays;
    this.state = new PageState({ moment: "peak" }, { moment: choiceReader(Object.keys(MOMENTS)) }, prefix);
    const tree = new CallTree(arrays.node_parent, arrays.node_frame, facts.frames);
    const tooltip = new Tooltip();
    const graph = (color) => new FlameGraph(tree, tooltip, { colorOf: (node, colors) => colors.bands[color], fewestRows: 2 });
    this.graphs = { grown: graph(5), shrunk: graph(0) };
    this.titles = { grown: make("h3", {}), shrunk: make("h3", {}) };
    const choices = Object.entries(MOMENTS).map(([value, text]) => make("option", { value }, text));
    this.choice = make("select", { onchange: () => this.state.set({ moment: this.choice.value }) }, ...choices);
    const parts = Object.keys(this.graphs).flatMap((kind) => [this.titles[kind], this.graphs[kind].element]);
    element.replaceChildren(make("div", { class: "toolbar" }, make("label", {}, "compare the memory ", this.choice)), ...parts, tooltip.element);
    this.state.listen(() => this.#show());
    this.#show();
  }

  #show() {
    const moment = this.state.get("moment");
    this.choice.value = moment;
    for (const [kind, graph] of Object.entries(this.graphs)) {
      graph.show(this.arrays[`${moment}_${kind}`]);
      this.titles[kind].textContent = `${kind === "grown" ? "Grown by" : "Shrunk by"} ${formatBytes(graph.total[0])}`;
    }
  }
}

drawExplorers("memory_difference", (views, arrays, facts, index) => new DifferenceView(views, arrays, facts, index ? `${index + 1}.` : ""));
