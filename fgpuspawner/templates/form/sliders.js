const root = document.querySelector(".fgpu-form");
const known = JSON.parse(root.dataset.known);
const by = (id) => document.getElementById(id);
const field = (name) => root.querySelector("[name=" + name + "]");
const group = by("fgpu-group");
const own = () => known.groups.find((g) => !group || g.name === group.value) || known.groups[0];
// Whether anything is other than the Hub has sent it.
let changed = false;
const chosen = () => root.querySelector("[name=image]:checked");

/** Return the values from ``step`` to ``most``, ``step`` apart; ``most`` itself is always one. */
function steps(step, most) {
  const found = [];
  for (let n = 1; n * step < most; n++) { found.push(String(Number((n * step).toFixed(3)))); }
  found.push(String(most));
  return found;
}
/** A slider beside a field: each of its places is a value that can be asked for; others are typed. */
class Slider {
  constructor(name, id, unit, values) {
    this.field = field(name);
    this.input = by(id);
    this.unit = unit;
    this.values = values;
    this.marks = root.querySelector("[data-track=" + name + "] .marks");
    this.marked = root.querySelector("[data-marked=" + name + "]");
    this.input.parentElement.hidden = false;
    this.input.addEventListener("input", () => { this.set(this.all()[this.input.value]); });
    this.field.addEventListener("input", () => this.show());
    // The arrows of a number field would go up by one: they go to the next amount that can be asked for.
    this.field.addEventListener("keydown", (event) => {
      const by = { ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (!by) { return; }
      event.preventDefault();
      const values = this.all();
      const next = values[Math.min(values.length - 1, Math.max(0, this.at(this.field.value) + by))];
      if (next === this.field.value) { return; }
      this.set(next);
      this.field.dispatchEvent(new Event("input", { bubbles: true }));
    });
    this.show();
  }
  all() {
    const values = this.values();
    return values.length ? values : [this.field.value];
  }
  /** Return the place of the value that is nearest to this one. */
  at(value) {
    let best = 0;
    this.all().forEach((v, n, all) => {
      if (Math.abs(v - value) < Math.abs(all[best] - value)) { best = n; }
    });
    return best;
  }
  set(value) {
    this.field.value = value;
    this.show();
  }
  show() {
    const values = this.all();
    this.input.max = values.length - 1;
    this.input.value = this.at(this.field.value);
    this.input.setAttribute("aria-valuetext", values[this.input.value] + this.unit);
  }
  /** Mark amounts, each with what it is; null is none. */
  mark(amounts) {
    if (!this.marks) { return; }
    this.marks.replaceChildren();
    this.marked.replaceChildren();
    const last = Math.max(1, this.all().length - 1);
    for (const [what, value] of Object.entries(amounts)) {
      if (!value) { continue; }
      const tick = document.createElement("span");
      tick.className = "tick " + what.split(" ")[0];
      tick.style.left = "calc(.5rem + (100% - 1rem) * " + this.at(value) / last + ")";
      this.marks.append(tick);
      const take = document.createElement("button");
      take.type = "button";
      take.className = "mark " + what.split(" ")[0];
      take.textContent = what + " " + value + this.unit;
      take.addEventListener("click", () => {
        this.set(value);
        this.field.dispatchEvent(new Event("input", { bubbles: true }));
      });
      this.marked.append(take);
    }
    this.marked.hidden = !this.marked.childElementCount;
  }
}
const sliders = {
  fgpu: new Slider("fgpu", "fgpu-slider", " fGPU", () => own().amounts.map((amount) => amount.fgpu)),
  cpu: new Slider("cpu", "fgpu-cpu-slider", " cores", () => steps(own().max_cpu > 4 ? 0.5 : 0.1, own().max_cpu)),
  memory_gib: new Slider("memory_gib", "fgpu-memory-slider", " GiB",
    () => steps(own().max_memory_gib > 32 ? 1 : 0.25, own().max_memory_gib)),
  count: new Slider("count", "fgpu-count-slider", " sessions", () => steps(1, Number(field("count").max)))
};
