// What views with a horizontal axis share: the position of the axis on the screen, and the gestures of the pointer.

const MOVE_PIXELS = 4; // a press of a button that moves the pointer by less is a click

/** The place of a horizontal axis in a view. `range` returns the visible range: its first and its last position. */
export class ScreenAxis {
  constructor(range, left, right) {
    this.range = range;
    this.left = left;
    this.right = right;
  }

  /** Return the x coordinate of a position on the axis. */
  xOf(position, width) {
    const [first, last] = this.range();
    return this.left + ((position - first) / (last - first)) * (width - this.left - this.right);
  }

  /** Return the position on the axis at an x coordinate. */
  position(x, width) {
    const [first, last] = this.range();
    return first + ((x - this.left) / (width - this.left - this.right)) * (last - first);
  }

  /** Return whether an x coordinate is inside the plot. */
  contains(x, width) {
    return x >= this.left && x <= width - this.right;
  }
}

/**
 * Add gestures to a view: the wheel zooms, a click calls `onClick(x, y)`, and dragging selects a window by
 * `onSelect(x1, x2)`; with Shift, or without `onSelect`, it moves the view. With Alt, the wheel scrolls the page.
 */
export function addGestures(app, surface, axis, { onClick, onMove, onSelect }) {
  const { canvas } = surface;
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (event.altKey) return;
      event.preventDefault();
      const [x] = surface.position(event);
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) app.pan(((event.deltaX || event.deltaY) / surface.width) * 0.5);
      else app.zoom(axis.position(x, surface.width), Math.exp(event.deltaY * 0.0015));
    },
    { passive: false },
  );
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    const [x] = surface.position(event);
    drag = { x, range: axis.range(), hasMoved: false, selects: onSelect && !event.shiftKey };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = surface.position(event);
    if (!drag) return onMove(event, x, y);
    if (Math.abs(x - drag.x) < MOVE_PIXELS && !drag.hasMoved) return;
    drag.hasMoved = true;
    app.tooltip.hide();
    if (drag.selects) return onSelect(Math.min(drag.x, x), Math.max(drag.x, x));
    const [first, last] = drag.range;
    app.show(first + ((drag.x - x) / (surface.width - axis.left - axis.right)) * (last - first), last - first);
  });
  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = surface.position(event);
    if (drag && !drag.hasMoved) onClick(x, y);
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => (drag = null));
  canvas.addEventListener("pointerleave", () => app.tooltip.hide());
  canvas.addEventListener("dblclick", () => app.showAll());
}
