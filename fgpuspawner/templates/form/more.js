// The amount of the GPU in words, and the CPU and memory that follow it until the user changes them.
const more = by("fgpu-more");
const exactMemory = () => Number(field("gpu_memory_mib").value) || 0;
/** Return the amount that is asked for, or the largest one below it; of exact memory that with the same part of a GPU. */
function amountNow() {
  const asked = byMemory() ? exactMemory() / own().max_gpu_memory_mib * own().fgpu_of_one : Number(field("fgpu").value);
  const below = own().amounts.filter((amount) => Number(amount.fgpu) <= asked + 1e-9);
  return below.length ? below[below.length - 1] : own().amounts[0];
}
function follow() {
  const amount = amountNow(), image = chosen() && known.images[chosen().value];
  for (const name of ["cpu", "memory_gib"]) {
    if (typed.has(name) || !amount) { continue; }
    const least = image && image.least[own().name][name] || 0;
    const recommended = image && image.recommended[name] && image.amounts[own().name][name];
    sliders[name].set(recommended || String(Math.max(Number(amount[name]), Number(least))));
  }
  showMore();
}
const gibWords = (mib) => mib < 512 ? mib + " MiB" : Number((mib / 1024).toFixed(1)) + " GiB";
function showMeaning() {
  const means = by("fgpu-means");
  let text = "";
  if (byMemory()) {
    const percent = field("compute_percent").value;
    text = exactMemory() ? gibWords(exactMemory()) + " of GPU memory" + (percent ? (own().lends ? ", at least " : ", ") + percent + " % compute" : "") : "";
  } else {
    const amount = own().amounts.find((one) => Number(one.fgpu) === Number(field("fgpu").value));
    const words = amount ? Object.entries(amount.means) : [];
    const liked = likedModels();
    const meant = liked.length ? words.filter(([name]) => liked.includes(name)) : words;
    const different = new Set(meant.map(([, what]) => what));
    const told = different.size === 1 ? [...different][0] : meant.map(([name, what]) => name + ": " + what).join("; ");
    text = told ? amount.fgpu + " fGPU = " + told : "";
  }
  means.hidden = !text;
  means.textContent = text;
}
function showMore() {
  const count = Number(field("count").value), time = field("time_limit").value.trim();
  const ends = /^[0-9]{1,5}:[0-5][0-9](:[0-5][0-9])?$/.test(time) ? "ends after " + time : "time limit not readable";
  const told = [
    field("cpu").value + (field("cpu").value === "1" ? " core" : " cores"),
    field("memory_gib").value + " GiB memory",
    time ? ends : field("time_limit").placeholder === "none" ? "no time limit" : "",
    count > 1 ? count + " sessions" : "1 session",
    likedModels().join(" or ")
  ];
  by("fgpu-more-now").textContent = told.filter(Boolean).join(", ");
  showMeaning();
}
root.addEventListener("input", (event) => {
  if (["fgpu", "gpu_memory_mib"].includes(event.target.name) || event.target.id === "fgpu-slider") { follow(); }
  showMore();
});
root.addEventListener("change", (event) => {
  if (event.target.name === "gpu_by") { follow(); }
  showMore();
});
// A browser sends nothing while a field is wrong, and cannot show one that is folded away.
root.addEventListener("invalid", (event) => { if (more.contains(event.target)) { more.open = true; } }, true);
// Start stands beside the forecast. The Hub's page has it behind this script.
document.addEventListener("DOMContentLoaded", () => {
  root.querySelector(".foot").append(root.closest("form").querySelector(".feedback-container"));
});
showMore();
