// Whose turn it is: one answer or race at a time, so that none slows another down.

class Turn {
  #owner = null;
  #controller = null; // stops what the owner does
  #watchers = [];

  get taken() {
    return this.#owner !== null;
  }

  isOf(owner) {
    return this.#owner === owner;
  }

  // ``show`` is called whenever somebody begins or ends.
  watch(show) {
    this.#watchers.push(show);
  }

  // Returns what is aborted when the owner has to stop.
  take(owner) {
    this.#set(owner, new AbortController());
    return this.#controller;
  }

  pass() {
    this.#set(null, null);
  }

  stop() {
    this.#controller?.abort();
  }

  #set(owner, controller) {
    [this.#owner, this.#controller] = [owner, controller];
    for (const show of this.#watchers) show();
  }
}

export const turn = new Turn();
