const root = document.getElementById("fgpu-waiting");
const by = (id) => document.getElementById(id);

// A notification of the browser, for users who ask for it: for the time when this page is hidden.
const WISH = "fgpu-tell:" + root.dataset.user + "/" + root.dataset.server;
const tell = by("fgpu-tell");
let wished = false;

function recall() {
  try {
    return sessionStorage.getItem(WISH) === "1";
  } catch (error) {
    return false;
  }
}
function wish(on) {
  wished = on;
  try {
    // The page reloads when the Hub restarts.
    sessionStorage.setItem(WISH, on ? "1" : "0");
  } catch (error) {
    // Then it is asked for again.
  }
  tell.setAttribute("aria-pressed", String(on));
  tell.textContent = on ? "You will be told" : "Tell me when it starts";
}
function say(text) {
  by("fgpu-told").hidden = !text;
  by("fgpu-told").textContent = text;
}
async function askBrowser() {
  if (wished) {
    wish(false);
    say("");
    return;
  }
  if (!("Notification" in window) || !window.isSecureContext) {
    say((window.isSecureContext ? "Your browser has no notifications for this page." : "Your browser notifies only over https.")
      + " This page's title shows your position.");
    return;
  }
  const answer = await Notification.requestPermission();
  wish(answer === "granted");
  say(answer === "granted" ? "Your browser tells you when the session starts."
    : answer === "denied" ? "Your browser blocks notifications. Allow them for this address in its settings."
    : "Notifications were not allowed. Press the button to be asked again.");
}
/** Tell of the end of the waiting, if that was wished for. */
function notify(title, body) {
  if (!wished || Notification.permission !== "granted") { return; }
  try {
    const note = new Notification(title, { body: body, tag: WISH });
    note.onclick = () => {
      window.focus();
      note.close();
    };
  } catch (error) {
    // Some browsers on phones have them for installed pages only.
  }
  wish(false);
}
tell.hidden = false;
tell.addEventListener("click", askBrowser);
if (recall() && "Notification" in window && Notification.permission === "granted") { wish(true); }
