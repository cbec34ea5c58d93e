/* The first page: keeps itself up to date, and asks before it ends a session. It works without this, too. */
(function () {
  "use strict";

  // As the Hub's own pages: the theme chosen there, else the system's (which the style sheet follows).
  try {
    const theme = localStorage.getItem("jupyterhub-bs-theme");
    if (theme === "light" || theme === "dark") {
      document.documentElement.setAttribute("data-bs-theme", theme);
    }
  } catch (error) {
    // Storage is switched off: then the system's theme.
  }

  const POLL_MS = 5000;
  const PULL_MS = 3000;
  const RETRY_STREAM_MS = 20000;
  const AT_MOST_EVERY_MS = 400;
  // A proxy keeps the stream of a service that was killed open; the service itself is heard of every 8 s.
  const SILENT_MS = 20000;

  document.addEventListener("DOMContentLoaded", function () {
    localise(document);
    const live = document.getElementById("live");
    if (live) {
      keepUpToDate(live);
    }
  });

  /** Show instants in the reader's own time zone; the day only where it is another one. */
  function localise(root) {
    const today = new Date().toDateString();
    for (const element of root.querySelectorAll("time")) {
      const at = new Date(element.dateTime);
      const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
      const same = at.toDateString() === today;
      element.textContent = same ? time : at.toLocaleDateString([], { day: "numeric", month: "short" }) + ", " + time;
      element.title = at.toLocaleString();
    }
  }

  function keepUpToDate(live) {
    const prefix = live.dataset.prefix;
    const headers = { "X-XSRFToken": live.dataset.xsrf };
    const said = document.getElementById("said");
    const offline = document.getElementById("offline");
    let readAt = Date.now();
    let source = null;
    let heardAt = 0;
    let poll = null;
    let retry = null;
    let planned = null;
    let pulled = null;
    let busy = false;
    let again = false;

    function say(text) {
      said.textContent = text;
    }

    function lost(why) {
      const age_s = Math.round((Date.now() - readAt) / 1000);
      offline.textContent = why + " What you see is " + age_s + " seconds old.";
      offline.hidden = false;
    }

    /** The cookie is not valid any more: load the page again, which logs in again; but not for ever. */
    function logInAgain() {
      const key = "fgpu-reloaded-at";
      const last = Number(sessionStorage.getItem(key) || 0);
      if (Date.now() - last > 30000) {
        sessionStorage.setItem(key, String(Date.now()));
        location.reload();
      } else {
        lost("You are not logged in any more; reload the page.");
      }
    }

    async function refresh() {
      if (busy) {
        again = true;
        return;
      }
      busy = true;
      try {
        const query = new URLSearchParams(location.search);
        query.set("part", "1");
        const answer = await fetch(prefix + "?" + query, { headers: headers });
        if (answer.status === 401 || answer.status === 403) {
          logInAgain();
          return;
        }
        const isPart = (answer.headers.get("Content-Type") || "").startsWith("text/html");
        if (!isPart || (!answer.ok && answer.status !== 503)) {
          const body = isPart ? null : await answer.json().catch(() => null);
          lost(body && body.error ? "This does not work now: " + body.error.message + "." : "The service does not answer.");
          return;
        }
        show(await answer.text());
        if (answer.ok) {
          readAt = Date.now();
        }
        offline.hidden = true;
      } catch (error) {
        lost("The service cannot be reached.");
      } finally {
        busy = false;
        if (again) {
          again = false;
          soon();
        }
      }
    }

    /** Put the new part in place; whoever is on a button stays on it. */
    function show(html) {
      const focused = live.contains(document.activeElement) ? document.activeElement.id : "";
      const fresh = document.createElement("div");
      fresh.innerHTML = html;
      localise(fresh);
      live.replaceChildren(...fresh.childNodes);
      // No event tells how far an image is.
      clearTimeout(pulled);
      pulled = live.querySelector(".pull") ? setTimeout(refresh, PULL_MS) : null;
      const again = focused ? document.getElementById(focused) : null;
      if (again) {
        again.focus({ preventScroll: true });
      } else if (focused) {
        document.getElementById("main").focus({ preventScroll: true });
      }
    }

    function soon() {
      if (planned === null) {
        planned = setTimeout(function () {
          planned = null;
          refresh();
        }, AT_MOST_EVERY_MS);
      }
    }

    function startPolling() {
      if (poll === null) {
        poll = setInterval(refresh, POLL_MS);
      }
    }

    function stopPolling() {
      clearInterval(poll);
      poll = null;
    }

    function listen() {
      clearTimeout(retry);
      if (source !== null || document.hidden) {
        return;
      }
      source = new EventSource(prefix + "api/v1/events?_xsrf=" + encodeURIComponent(live.dataset.xsrf));
      heardAt = Date.now();
      for (const name of ["open", "queue", "change", "alive"]) {
        source.addEventListener(name, function () { heardAt = Date.now(); });
      }
      source.addEventListener("open", stopPolling);
      source.addEventListener("queue", soon);
      source.addEventListener("change", function (event) {
        const session = JSON.parse(event.data).session;
        const whose = session.mine ? "" : " of " + session.user;
        say(session.display_name + whose + ": " + session.state);
      });
      source.addEventListener("error", function () {
        // While it reconnects by itself, and after it has given up, the page asks from time to time.
        startPolling();
        if (source && source.readyState === EventSource.CLOSED) {
          source = null;
          retry = setTimeout(listen, RETRY_STREAM_MS);
        }
      });
    }

    setInterval(function () {
      if (source !== null && Date.now() - heardAt > SILENT_MS) {
        rest();
        startPolling();
        listen();
      }
    }, 1000);

    function rest() {
      stopPolling();
      clearTimeout(pulled);
      clearTimeout(retry);
      if (source !== null) {
        source.close();
        source = null;
      }
    }

    // Tabs that nobody looks at hold no connection; a browser has six for all of them.
    document.addEventListener("visibilitychange", function () {
      if (document.hidden) {
        rest();
      } else {
        refresh();
        listen();
      }
    });
    window.addEventListener("pagehide", rest);
    window.addEventListener("pageshow", function (event) {
      if (event.persisted) {
        refresh();
        listen();
      }
    });
    listen();
    keepInPlace(live, prefix, headers, say, soon);
    askBeforeEnding(live, prefix, headers, say, soon);
  }

  /** Keep an idle session without leaving the page. */
  function keepInPlace(live, prefix, headers, say, changed) {
    live.addEventListener("submit", async function (event) {
      const form = event.target.closest("form.keep");
      if (!form) {
        return;
      }
      event.preventDefault();
      const button = form.querySelector("button");
      button.disabled = true;
      let why = "the service cannot be reached";
      try {
        const answer = await fetch(prefix + "api/v1/sessions/" + form.dataset.id + "/keep", { method: "POST", headers: headers });
        if (answer.ok) {
          say(form.dataset.name + " is kept");
          changed();
          return;
        }
        const body = await answer.json().catch(() => null);
        why = body && body.error ? body.error.message : "the service answered " + answer.status;
      } catch (error) {
        // Said below.
      }
      button.disabled = false;
      const said = form.querySelector(".warning") || form.appendChild(document.createElement("span"));
      said.className = "warning";
      said.textContent = "Not kept: " + why;
      say(form.dataset.name + " could not be kept: " + why);
    });
  }

  function askBeforeEnding(live, prefix, headers, say, changed) {
    const dialog = document.getElementById("confirm");
    const title = document.getElementById("confirm-title");
    const text = document.getElementById("confirm-text");
    const trouble = document.getElementById("confirm-trouble");
    const yes = document.getElementById("confirm-yes");
    let asked = null;

    live.addEventListener("submit", function (event) {
      const form = event.target.closest("form.power");
      if (!form || !dialog.showModal) {
        return;
      }
      event.preventDefault();
      asked = { id: form.dataset.id, name: form.dataset.name };
      const cancel = form.dataset.verb === "Cancel";
      const whose = form.dataset.user ? " of " + form.dataset.user : "";
      title.textContent = cancel ? "Cancel " + asked.name + whose + "?" : "End " + asked.name + whose + "?";
      text.textContent = cancel
        ? "It loses its place in the queue."
        : "Its programs stop, and what they have not saved is lost. Files in the home folder stay.";
      yes.textContent = cancel ? "Cancel the request" : "End the session";
      yes.disabled = false;
      trouble.hidden = true;
      dialog.showModal();
    });

    yes.addEventListener("click", async function () {
      const session = asked;
      yes.disabled = true;
      trouble.hidden = true;
      let why = "The service cannot be reached.";
      try {
        const answer = await fetch(prefix + "api/v1/sessions/" + session.id, { method: "DELETE", headers: headers });
        if (answer.ok || answer.status === 409 || answer.status === 404) {
          const body = answer.ok ? null : await answer.json().catch(() => null);
          if (!body || body.error.code === "already_ended" || body.error.code === "no_such_session") {
            say(session.name + " ends");
            dialog.close();
            changed();
            return;
          }
          why = body.error.message;
        } else {
          const body = await answer.json().catch(() => null);
          why = body && body.error ? body.error.message : "The service answered " + answer.status + ".";
        }
      } catch (error) {
        // What is said below.
      }
      trouble.textContent = why;
      trouble.hidden = false;
      yes.disabled = false;
    });
  }
})();
