// One image is meant: that of a card, or the one that is named. Naming one lets go of the card, and the other way round.
const named = field("image_name");
let before = null;
function nameChanged() {
  const now = chosen();
  if (named.value.trim()) {
    named.closest("details").open = true;
    before = now || before;
    if (now) { now.checked = false; }
  } else if (!now && before) {
    before.checked = true;
  }
}
// Without scripts, what is said of every image is there; with them, of one on each card: the chosen one, or its first.
function describe() {
  const now = chosen();
  by("fgpu-chosen").textContent = now ? now.dataset.name : named.value.trim();
  for (const card of root.querySelectorAll(".image-card")) {
    const inside = card.querySelector("[name=image]:checked");
    const shown = inside || card.querySelector(".version:not([hidden]) [name=image]");
    card.classList.toggle("is-chosen", inside !== null);
    for (const line of card.querySelectorAll(".about")) {
      line.hidden = !shown || line.dataset.image !== shown.value;
      for (const whose of line.getElementsByClassName("whose")) { whose.hidden = true; }
      // A long text can be scrolled with the keyboard, too.
      if (line.scrollHeight > line.clientHeight) { line.tabIndex = 0; } else { line.removeAttribute("tabindex"); }
    }
  }
}
// With the image goes what is recommended for it, but for what was typed or given.
const typed = new Set(known.given);
root.addEventListener("input", (event) => {
  const track = event.target.closest("[data-track]");
  typed.add(track ? track.dataset.track : event.target.name);
});
function preselect() {
  const found = chosen() && known.images[chosen().value];
  if (!found) {
    follow();
    return;
  }
  if (!typed.has("fgpu")) { sliders.fgpu.set(found.amounts[own().name].fgpu); }
  const gpuMemory = found.gpu_memory_mib[own().name];
  if (gpuMemory && !typed.has("gpu_memory_mib")) { field("gpu_memory_mib").value = gpuMemory; }
  follow();
}
function showMarks() {
  const found = chosen() && known.images[chosen().value];
  for (const name of ["fgpu", "cpu", "memory_gib"]) {
    sliders[name].mark(found ? {
      least: found.least[own().name][name],
      recommended: found.recommended[name] ? found.amounts[own().name][name] : null,
      "enough for your last runs": name === "fgpu" ? found.enough : null
    } : {});
  }
}
function imageChanged() {
  named.value = "";
  describe();
  preselect();
  showMarks();
}
root.addEventListener("change", (event) => { if (event.target.name === "image") { imageChanged(); } });
named.addEventListener("input", () => {
  nameChanged();
  describe();
  showMarks();
});
if (group) {
  group.addEventListener("change", () => {
    preselect();
    for (const slider of Object.values(sliders)) { slider.show(); }
    showMarks();
    showModels();
  });
}
// A click anywhere on a card chooses its first image, unless one of its own is chosen.
root.addEventListener("click", (event) => {
  const card = event.target.closest(".image-card");
  const first = card && card.querySelector(".version:not([hidden]) input");
  if (first && !event.target.closest("label, a, button") && !card.querySelector("input:checked")) { first.click(); }
});
nameChanged();
describe();
showMarks();

/** Show the images of another form of this page, and keep the choice. */
function takeImages(form) {
  const value = chosen() && chosen().value, left = before && before.value, focused = document.activeElement;
  const radio = (value) => [...root.querySelectorAll("[name=image]")].find((r) => r.value === value) || null;
  const inside = focused.name === "image" ? focused.value : null;
  known.images = JSON.parse(form.dataset.known).images;
  root.querySelector(".cards").replaceWith(form.querySelector(".cards"));
  for (const each of root.querySelectorAll("[name=image]")) { each.checked = each.value === value; }
  before = radio(left);
  if (radio(inside)) { radio(inside).focus(); }
  showMarks();
  find();
}
// The search hides what it does not find. The chosen image is named above, found or not.
const search = by("fgpu-search");
function find() {
  if (!search) {
    describe();
    return;
  }
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const version of root.querySelectorAll(".version")) {
    version.hidden = !words.every((word) => version.dataset.search.includes(word));
    found += version.hidden ? 0 : 1;
  }
  for (const card of root.querySelectorAll(".image-card")) {
    card.hidden = !card.querySelector(".version:not([hidden])");
  }
  const all = root.querySelectorAll(".version").length;
  by("fgpu-search-found").textContent = words.length ? found + " of " + all + " images. Enter takes the first." : "";
  describe();
}
if (search) {
  by("fgpu-search-box").hidden = false;
  search.addEventListener("input", (event) => {
    event.stopPropagation();
    find();
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && search.value) {
      event.preventDefault();
      search.value = "";
      find();
    }
    if (event.key !== "Enter") { return; }
    // Enter in a field would send the form.
    event.preventDefault();
    const first = root.querySelector(".version:not([hidden]) input");
    if (search.value.trim() && first) {
      first.click();
      first.focus();
    }
  });
  find();
}
