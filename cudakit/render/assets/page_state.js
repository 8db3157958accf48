// The state that all views of a page share; it is kept in the hash of the address.

/** Values by name, with functions to call when they change. */
export class PageState {
  /** A prefix tells the values of several explorers of one page apart. */
  constructor(defaults, readers, prefix = "") {
    this.prefix = prefix;
    this.defaults = { ...defaults };
    this.readers = readers;
    this.values = { ...defaults, ...this.#fromHash() };
    this.listeners = [];
    this.scheduled = false;
    this.changed = new Set();
    addEventListener("hashchange", () => this.set({ ...this.defaults, ...this.#fromHash() }));
  }

  get(name) {
    return this.values[name];
  }

  /** Change values; listeners are called once before the next frame is drawn. */
  set(values) {
    for (const [name, value] of Object.entries(values)) {
      if (JSON.stringify(this.values[name]) === JSON.stringify(value)) continue;
      this.values[name] = value;
      this.changed.add(name);
    }
    if (this.changed.size && !this.scheduled) {
      this.scheduled = true;
      requestAnimationFrame(() => this.notify());
    }
  }

  /** Call listener(names of changed values) after changes. */
  listen(listener) {
    this.listeners.push(listener);
  }

  /** Call the listeners if values changed since the last call. */
  notify() {
    if (!this.changed.size) return;
    const changed = this.changed;
    this.changed = new Set();
    this.scheduled = false;
    for (const listener of this.listeners) listener(changed);
    clearTimeout(this.saving);
    this.saving = setTimeout(() => this.#save(), 200);
  }

  #save() {
    const parts = location.hash.slice(1).split("&").filter((part) => part && !this.#isOwn(part.split("=")[0]));
    for (const [name, value] of Object.entries(this.values)) {
      if (JSON.stringify(value) === JSON.stringify(this.defaults[name])) continue;
      parts.push(`${this.prefix}${name}=${encodeURIComponent(Array.isArray(value) ? value.join("-") : value)}`);
    }
    history.replaceState(null, "", parts.length ? `#${parts.join("&")}` : location.pathname + location.search);
  }

  #isOwn(prefixed) {
    return prefixed.startsWith(this.prefix) && Object.hasOwn(this.readers, prefixed.slice(this.prefix.length));
  }

  /** Return the valid values of the hash: a reader returns undefined for anything else. */
  #fromHash() {
    const found = {};
    for (const part of location.hash.slice(1).split("&")) {
      const [prefixed, text] = part.split("=");
      if (text === undefined || !this.#isOwn(prefixed)) continue;
      const name = prefixed.slice(this.prefix.length);
      let value;
      try {
        value = this.readers[name](decodeURIComponent(text));
      } catch {
        continue; // a damaged escape sequence
      }
      if (value !== undefined) found[name] = value;
    }
    return found;
  }
}

/** Return a reader of whole numbers from low to high. */
export function numberReader(low, high) {
  return (text) => (/^-?\d{1,15}$/.test(text) && Number(text) >= low && Number(text) <= high ? Number(text) : undefined);
}

/** Return a reader of ranges, "FIRST-LAST", of whole numbers from low to high. */
export function rangeReader(low, high) {
  return (text) => {
    const match = /^(-?\d{1,15})-(-?\d{1,15})$/.exec(text);
    if (!match) return undefined;
    const [first, last] = [Number(match[1]), Number(match[2])];
    return first >= low && last <= high && first < last ? [first, last] : undefined;
  };
}

/** Return a reader that accepts some texts only. */
export function choiceReader(choices) {
  return (text) => (choices.includes(text) ? text : undefined);
}
