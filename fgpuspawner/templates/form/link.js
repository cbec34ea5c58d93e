// Values behind the # of a link, such as of one in JupyterLab: they are shown, and start nothing.
const LINKED = ["image", "group", "fgpu", "gpu_memory_mib", "compute_percent", "gpu_models", "gpu_model", "cpu", "memory_mib",
  "memory_gib", "count", "time_limit", "time_limit_s", "priority", "account", "gpu",
  "folders"];
const linked = Object.fromEntries(
  [...new URLSearchParams(window.location.hash.slice(1))].filter(([name]) => LINKED.includes(name))
);
// The form asks for it in hours and minutes; 0 is none.
if (/^\d{1,9}$/.test(linked.time_limit_s || "")) {
  const minutes = Math.ceil(linked.time_limit_s / 60);
  linked.time_limit = minutes ? Math.floor(minutes / 60) + ":" + String(minutes % 60).padStart(2, "0") : "";
}
delete linked.time_limit_s;
// And for memory in GiB.
if (/^\d{1,9}$/.test(linked.memory_mib || "")) { linked.memory_gib = String(Number((linked.memory_mib / 1024).toFixed(4))); }
delete linked.memory_mib;
if (linked.gpu_model) { linked.gpu_models = linked.gpu_model; }
delete linked.gpu_model;
if (Object.keys(linked).length) {
  fill({ gpu_by: linked.gpu_memory_mib ? "memory" : "fgpu", ...linked });
  changed = true;
  ask();
}
