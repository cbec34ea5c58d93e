// A preset, or a launch as before: it fills in the fields that it says, and starts nothing.
// With an image or a group that it says go their amounts, as in the link that it is without scripts.
const quick = by("fgpu-quick");
function fill(fields) {
  if (fields.image || fields.group) {
    for (const name of ["fgpu", "cpu", "memory_gib", "gpu_memory_mib"]) { typed.delete(name); }
  }
  for (const [name, value] of Object.entries(fields)) {
    if (name === "image") {
      const radio = [...root.querySelectorAll("[name=image]")].find((r) => r.value === value);
      if (radio) { radio.checked = true; }
      // One that is not shown is asked for by its name.
      named.value = radio ? "" : value;
      nameChanged();
    } else if (name === "gpu_by") {
      for (const way of ways) { way.checked = way.value === value; }
    } else if (name === "gpu_models") {
      const names = value.split(",").map((one) => one.trim());
      models.forEach((one, at) => { one.value = names[at] || ""; });
    } else if (name === "folders") {
      const names = value.split(",").map((one) => one.trim());
      for (const box of root.querySelectorAll("[name=folders]")) { box.checked = names.includes(box.value); }
    } else if (field(name)) {
      field(name).value = value;
    }
    typed.add(name);
  }
  if (fields.image || fields.group) { preselect(); } else { follow(); }
  for (const slider of Object.values(sliders)) { slider.show(); }
  showWay();
  showModels();
  describe();
  showMarks();
  showMore();
}
if (quick) {
  quick.hidden = false;
  by("fgpu-quick-links").remove();
  quick.addEventListener("click", (event) => {
    const choice = event.target.closest(".choice");
    if (!choice) { return; }
    fill(JSON.parse(choice.dataset.fields));
    by("fgpu-filled").textContent = choice.querySelector(".choice-title").textContent + " is filled in below.";
    changed = true;
    ask();
  });
}
