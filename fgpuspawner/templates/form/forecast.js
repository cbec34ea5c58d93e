// The service gives a forecast for the ticket in this page, and takes nothing else from here.
const box = by("fgpu-forecast");
const WAIT_MS = 25, PATIENCE_MS = 1500, AGAIN_MS = 20000;
// While a framework is being installed, which is shown.
const INSTALLING_MS = 2000;
// No press lasts longer: a browser can forget that a button was released.
const PRESSED_AT_MOST_MS = 30000, LOOK_AGAIN_MS = 100;
let timer = null, last = null, sent = 0, old = false;
/** Ask soon. One question is under way at a time: the next waits for its answer, which is not shown, but not for long. */
function ask() {
  // What is shown is of other amounts from now on: an answer that comes late must not be taken for theirs.
  old = true;
  box.classList.add("is-old");
  box.setAttribute("aria-busy", "true");
  clearTimeout(timer);
  timer = setTimeout(send, last ? Math.max(WAIT_MS, sent + PATIENCE_MS - Date.now()) : WAIT_MS);
}
const isTooOld = (answer) => answer !== null && answer.error && answer.error.code === "bad_ticket";
async function forecast(query, signal) {
  try {
    const response = await fetch(root.dataset.service + "api/v1/forecast?" + query, {
      credentials: "same-origin", signal,
      headers: { "X-FGPU-Ticket": root.dataset.ticket }
    });
    const answer = await response.json();
    return response.ok || answer.error ? answer : null;
  } catch (error) {
    return null;
  }
}
/** A ticket ends after an hour, and with the Hub that gave it: take one from a form of now, and keep what is filled in. */
async function newForm(signal) {
  try {
    // Without options: with them the Hub would start a server.
    const answer = await fetch(window.location.pathname, {
      credentials: "same-origin", cache: "no-store", redirect: "manual", signal
    });
    const form = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector(".fgpu-form");
    if (form) { root.dataset.ticket = form.dataset.ticket; }
    return form;
  } catch (error) {
    return null;
  }
}
const lines = by("fgpu-installing");
/** Show how far frameworks are that are being installed, and the image of each that is ready. */
async function showInstalling(found, signal) {
  for (const line of [...lines.children]) {
    if (!line.dataset.ended && !found.some((one) => one.name === line.dataset.name)) { line.remove(); }
  }
  for (const { name, state, text } of found) {
    let line = [...lines.children].find((each) => each.dataset.name === name);
    if (!line && state === "installing") {
      line = document.createElement("p");
      line.className = "hint mb-1";
      line.dataset.name = name;
      line.setAttribute("role", "status");
      line.append(document.createElement("strong"), ": ", document.createElement("span"));
      line.firstChild.textContent = name;
      lines.append(line);
    }
    if (!line || line.dataset.ended) { continue; }
    // Read out at its end, not with each percent.
    line.setAttribute("aria-busy", String(state === "installing"));
    line.querySelector("span").textContent = text;
    if (state === "failed") { line.dataset.ended = state; }
    if (state !== "ready") { continue; }
    const form = await newForm(signal), has = (place) => [...place.querySelectorAll("[name=image]")].some((r) => r.dataset.name === name);
    // The Hub reads the catalogue every two seconds.
    if (form && has(form)) {
      takeImages(form);
      line.dataset.ended = state;
    }
  }
}
const isInstalling = () => [...lines.children].some((line) => !line.dataset.ended);
/** Wait while a button is pressed: one that moves away, or is made again, under the pointer is not clicked. */
async function untilReleased() {
  const deadline = Date.now() + PRESSED_AT_MOST_MS;
  while (root.querySelector("button:active") && Date.now() < deadline) {
    await new Promise((resolve) => setTimeout(resolve, LOOK_AGAIN_MS));
  }
}
async function send() {
  clearTimeout(timer);
  timer = setTimeout(again, isInstalling() ? INSTALLING_MS : AGAIN_MS);
  if (last) { last.abort(); }
  const mine = last = new AbortController();
  sent = Date.now();
  old = false;
  const query = new URLSearchParams();
  for (const [name, value] of new FormData(root.closest("form"))) {
    // Secrets stay in the form.
    if (field(name) && !["setup", "variables", "script"].includes(name)) { query.append(name, value); }
  }
  let answer = await forecast(query, mine.signal);
  if (isTooOld(answer) && await newForm(mine.signal)) { answer = await forecast(query, mine.signal); }
  await untilReleased();
  if (answer && answer.installing) { await showInstalling(answer.installing, mine.signal); }
  if (mine !== last) { return; }
  last = null;
  if (old) {
    send();
    return;
  }
  box.classList.remove("is-old");
  box.removeAttribute("aria-busy");
  show(answer);
}
/** Ask again from time to time while the page is visible: other sessions start and end. */
function again() {
  if (document.hidden) {
    timer = setTimeout(again, isInstalling() ? INSTALLING_MS : AGAIN_MS);
  } else {
    send();
  }
}
const { startWords, when } = window.fgpu;
function nth(n) {
  const last = n % 10, teen = n % 100 > 10 && n % 100 < 14;
  return n + (teen ? "th" : last === 1 ? "st" : last === 2 ? "nd" : last === 3 ? "rd" : "th");
}
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
// The next text is built before it replaces the current one.
let next = document.createDocumentFragment();
function add(tag, text, kind) {
  const part = document.createElement(tag);
  part.textContent = text;
  if (kind) { part.className = kind; }
  next.append(part, " ");
  return part;
}
/** Offer another amount, with the CPU and memory that it was forecast with. */
function offer(amount, beside, what) {
  const take = add("button", "Take " + amount + " fGPU: " + what, "btn btn-sm btn-outline-secondary take");
  take.type = "button";
  take.addEventListener("click", () => {
    by("fgpu-by-fgpu").checked = true;
    showWay();
    typed.add("fgpu");
    sliders.fgpu.set(amount);
    sliders.cpu.set(beside.cpu);
    sliders.memory_gib.set(beside.memory_gib);
    showMore();
    changed = true;
    ask();
    field("fgpu").focus();
  });
}
/** Offer less CPU and memory beside the same GPU. */
function offerBeside(cpu, memory_gib, what) {
  const take = add("button", "Take " + cpu + (cpu === "1" ? " core" : " cores") + " and " + memory_gib + " GiB: " + what,
    "btn btn-sm btn-outline-secondary take");
  take.type = "button";
  take.addEventListener("click", () => {
    for (const [name, value] of [["cpu", cpu], ["memory_gib", memory_gib]]) {
      typed.add(name);
      sliders[name].set(value);
    }
    showMore();
    changed = true;
    ask();
    more.querySelector("summary").focus();
  });
}
/** Return a refusal without the name of its option, which is none of the form's words. */
const reason = (r) => r.message.startsWith(r.field + ": ") ? r.message.slice(r.field.length + 2) : r.message;
const refusalWords = (r) => known.labels[r.field] ? known.labels[r.field] + ": " + reason(r) : r.message;
// What the Hub refused stays at its field until something is changed: not all of it can be seen from here.
function mark(refusals) {
  if (!changed && !refusals.length) { return; }
  for (const place of root.querySelectorAll("[data-refused]")) {
    const name = place.dataset.refused;
    const here = refusals.filter((r) => (known.at[r.field] || r.field) === name);
    const text = here.map(reason).join("; ");
    if (place.textContent !== text) { place.textContent = text; }
    place.hidden = !here.length;
    const marked = name === "image" ? by("fgpu-images") : field(name);
    if (!marked) { continue; }
    marked.classList.toggle("is-invalid", here.length > 0);
    if (here.length) { marked.setAttribute("aria-invalid", "true"); } else { marked.removeAttribute("aria-invalid"); }
    if (here.length && more.contains(marked)) { more.open = true; }
  }
}
function showQuota(quota) {
  const text = quota && quota.text ? sentence(quota.text) : "";
  by("fgpu-quota").hidden = !text;
  by("fgpu-quota").textContent = text;
}
/** Show an answer, if it is another: what stays as it is keeps the focus, and is not read out again. */
function show(f) {
  next = document.createDocumentFragment();
  const kind = "fgpu-forecast" + describeAnswer(f);
  const shown = document.createElement("div");
  shown.append(next);
  const same = !box.hidden && box.className === kind && shown.innerHTML === box.innerHTML;
  if (same) { return; }
  const taking = document.activeElement.matches(".take") && box.contains(document.activeElement);
  box.hidden = false;
  box.className = kind;
  box.replaceChildren(...shown.childNodes);
  if (taking) { (box.querySelector(".take") || field("fgpu")).focus(); }
}
/** Return what would be refused: also more sessions than the Hub has servers for, which the service does not know. */
function refusalsOf(f) {
  const most = Number(field("count").max);
  if (f.count <= most || f.refusals.some((r) => r.field === "count")) { return f.refusals; }
  return [...f.refusals, { field: "count", message: "you can start at most " + most + " at once" }];
}
/** Add what is said of an answer, and return of what kind it is. */
function describeAnswer(f) {
  const answered = f !== null && !f.error;
  const refusals = answered ? refusalsOf(f) : [];
  mark(refusals);
  showQuota(answered ? f.quota : null);
  if (!answered) {
    add("span", isTooOld(f)
      ? "This page is too old for a forecast. Open the form again. You can start all the same."
      : f === null || !f.error.message
      ? "No forecast: the queue's service does not answer. You can start all the same."
      : "No forecast: " + sentence(f.error.message) + " You can start all the same.");
    return "";
  }
  if (refusals.length) {
    // The reason stands at its field; here where no change of a field would help, or the form has no such field.
    const elsewhere = refusals.filter((r) => r.field === "options" || ["too_many_pending", "over_quota", "no_amount_fits", "no_group"].includes(r.code)
      || !root.querySelector(`[data-refused="${known.at[r.field] || r.field}"]`));
    const names = [...new Set(refusals.filter((r) => !elsewhere.includes(r)).map((r) => known.labels[r.field] || r.field))];
    add("span", [names.length ? "To start, change: " + names.join(", ") + "." : "", ...elsewhere.map(refusalWords).map(sentence)]
      .filter(Boolean).join(" "));
    return " never";
  }
  if (f.starts_now) {
    // "Starts now", "all 3 start now", or that a session on demand opens now and when it would get its GPU.
    add("strong", sentence(f.text));
    return " now";
  }
  const start = startWords(f);
  const place = f.position === 1 ? "next in the queue" : f.position ? nth(f.position) + " in the queue" : "";
  if (f.count > 1) {
    add("strong", sentence(f.text));
    const who = f.count - f.startable_now > 1 ? "The last would be " : "It would be ";
    if (place) { add("span", sentence(who + place + (start ? ", " + start : ""))); }
  } else {
    add("strong", sentence([place && "You would be " + place, start].filter(Boolean).join(", ") || "It would wait"));
    add("span", sentence(f.text));
  }
  if (f.waits_for) { add("span", sentence(f.waits_for.text)); }
  add("span", sentence((start ? "Estimated from " : "") + f.basis));
  const starts = f.count > 1 ? "all " + f.count + " start now" : "starts now";
  if (f.beside_now) {
    offerBeside(f.beside_now.cpu, f.beside_now.memory_gib, starts);
  } else if (f.largest_now && (byMemory() || Number(f.largest_now) < Number(field("fgpu").value))) {
    offer(f.largest_now, f.beside_other, starts);
  } else if (f.soonest) {
    offer(f.soonest, f.beside_other, (f.count > 1 ? "the last starts about " : "starts about ") + when(f.soonest_at_s));
  }
  return " wait";
}
// What gets the focus is never behind the forecast, which stays at the bottom of the window and has no fixed height.
const foot = root.querySelector(".foot");
new ResizeObserver(() => {
  document.documentElement.style.scrollPaddingBottom = foot.offsetHeight + 8 + "px";
}).observe(foot);
for (const kind of ["input", "change"]) {
  root.addEventListener(kind, (event) => {
    if (event.target.id === "fgpu-search") { return; }
    changed = true;
    ask();
  });
}
send();
