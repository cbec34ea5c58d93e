// One of two ways to ask for the GPU; what was typed for the other stays, and is not meant.
const ways = root.querySelectorAll("[name=gpu_by]");
const byMemory = () => root.querySelector("[name=gpu_by]:checked").value === "memory";
function showWay() {
  for (const part of root.querySelectorAll("[data-by]")) {
    const isMeant = (part.dataset.by === "memory") === byMemory();
    part.hidden = !isMeant;
    // A browser looks at hidden fields too, and sends nothing while one is out of its range, without a word.
    for (const input of part.getElementsByTagName("input")) { input.disabled = !isMeant; }
  }
  field("fgpu").required = !byMemory();
  field("gpu_memory_mib").required = byMemory();
}
for (const way of ways) { way.addEventListener("change", showWay); }
showWay();
// A browser that returns to this page restores the fields without an event.
window.addEventListener("pageshow", showWay);

// Models in order of liking: those that the chosen group has, each once. The first empty field ends the list.
const models = [...root.querySelectorAll("[name=gpu_models]")];
const likedModels = () => models.map((one) => one.value).filter(Boolean);
function showModels() {
  let left = own().models;
  for (const one of models) {
    for (const option of one.options) {
      option.hidden = option.disabled = option.value !== "" && !left.includes(option.value);
    }
    // None is chosen where a link names a model that is not there.
    if (one.selectedIndex < 0 || one.selectedOptions[0].disabled) { one.value = ""; }
    one.closest(".liked").hidden = one !== models[0] && !left.length;
    left = one.value ? left.filter((name) => name !== one.value) : [];
  }
}
for (const one of models) { one.addEventListener("change", showModels); }
showModels();
