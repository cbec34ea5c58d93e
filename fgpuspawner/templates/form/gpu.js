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
// A browser that comes back to this page puts in what was there, and tells nobody.
window.addEventListener("pageshow", showWay);

// Only models that the chosen group has.
const model = by("fgpu-model");
function showModels() {
  for (const option of model ? model.options : []) {
    option.hidden = option.disabled = option.value !== "" && !own().models.includes(option.value);
  }
  // None is chosen where a link names a model that is not there.
  if (model && (model.selectedIndex < 0 || model.selectedOptions[0].disabled)) { model.value = ""; }
}
showModels();
