/* Keeps a page up to date: by the service's event stream while it is visible, else by polling. */
(function () {
  "use strict";

  const POLL_MS = 5000;
  const RETRY_STREAM_MS = 20000;
  const AT_MOST_EVERY_MS = 400;
  // A proxy keeps the stream of a service that was killed open; the service itself is heard of every 8 s.
  const SILENT_MS = 20000;

  /**
   * Call `ask` whenever something may have changed, and never twice at a time.
   *
   * `ask` gets a function that fetches an address below the prefix, and says on the page what is wrong when that fails:
   * it returns the answer, or null. `rest` is called when the page is hidden. Changes of sessions are announced in #said.
   */
  function keepUpToDate(live, ask, rest) {
    const prefix = live.dataset.prefix;
    const headers = { "X-XSRFToken": live.dataset.xsrf };
    const said = document.getElementById("said");
    const offline = document.getElementById("offline");
    let readAt = Date.now();
    let source = null;
    let heardAt = 0;
    let lastId = "";
    let poll = null;
    let retry = null;
    let planned = null;
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

    /** The cookie has expired: reload the page, which logs in again; at most once in 30 s. */
    function logInAgain() {
      const key = "fgpu-reloaded-at";
      const last = Number(sessionStorage.getItem(key) || 0);
      if (Date.now() - last > 30000) {
        sessionStorage.setItem(key, String(Date.now()));
        location.reload();
      } else {
        lost("You are logged out; reload the page.");
      }
    }

    /** Return a JSON answer, which is complete or was read while the database was away; null where there is none. */
    async function get(address) {
      let answer, body;
      try {
        answer = await fetch(prefix + address, { headers: headers });
        const isJson = (answer.headers.get("Content-Type") || "").startsWith("application/json");
        body = isJson ? await answer.json() : null;
      } catch (error) {
        lost("The service cannot be reached.");
        return null;
      }
      if (answer.status === 401 || answer.status === 403) {
        logInAgain();
        return null;
      }
      if (body === null || body.error || (!answer.ok && answer.status !== 503)) {
        lost(body && body.error ? "This does not work now: " + body.error.message + "." : "The service does not answer.");
        return null;
      }
      if (answer.ok) {
        readAt = Date.now();
      }
      offline.hidden = true;
      return body;
    }

    async function refresh() {
      if (busy) {
        again = true;
        return;
      }
      busy = true;
      try {
        await ask(get);
      } finally {
        busy = false;
        if (again) {
          again = false;
          soon();
        }
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
      const query = new URLSearchParams({ _xsrf: live.dataset.xsrf });
      if (lastId) {
        // A browser says this by itself only while it is the same stream that it opens again.
        query.set("last_event_id", lastId);
      }
      source = new EventSource(prefix + "api/v1/events?" + query);
      heardAt = Date.now();
      for (const name of ["open", "queue", "change", "alive"]) {
        source.addEventListener(name, function (event) {
          heardAt = Date.now();
          lastId = event.lastEventId || lastId;
        });
      }
      source.addEventListener("alive", function () {
        // Nothing has changed since the page was read: it is as of now.
        if (planned === null && !busy && offline.hidden) {
          readAt = Date.now();
        }
      });
      source.addEventListener("open", stopPolling);
      source.addEventListener("queue", soon);
      source.addEventListener("change", function (event) {
        const session = JSON.parse(event.data).session;
        const owner = session.mine ? "" : " of " + session.user;
        say(session.display_name + owner + ": " + session.state);
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

    function leave() {
      stopPolling();
      clearTimeout(retry);
      if (source !== null) {
        source.close();
        source = null;
      }
    }

    setInterval(function () {
      if (source !== null && Date.now() - heardAt > SILENT_MS) {
        leave();
        startPolling();
        listen();
      }
    }, 1000);

    function back() {
      refresh();
      listen();
    }

    // Hidden tabs hold no connection: a browser has six for all of them.
    document.addEventListener("visibilitychange", function () {
      if (document.hidden) {
        leave();
        rest();
      } else {
        back();
      }
    });
    window.addEventListener("pagehide", leave);
    window.addEventListener("pageshow", function (event) {
      if (event.persisted) {
        back();
      }
    });
    listen();
    return { say: say, soon: soon, now: refresh, headers: headers, prefix: prefix };
  }

  /** Replace an element's contents if they differ, and keep the focus. */
  function show(element, html) {
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    window.fgpu.localise(fresh.content);
    // The page as it came has been read and made local in the same way.
    if (fresh.innerHTML.trim() === element.innerHTML.trim()) {
      return;
    }
    const focused = element.contains(document.activeElement) ? document.activeElement.id : "";
    element.replaceChildren(fresh.content);
    focusAgain(focused);
  }

  /** Put the focus where it was before its element was replaced, or on the page's contents where that is gone. */
  function focusAgain(id) {
    if (id) {
      (document.getElementById(id) || document.getElementById("main")).focus({ preventScroll: true });
    }
  }

  Object.assign(window.fgpu, { keepUpToDate: keepUpToDate, show: show, focusAgain: focusAgain });
})();
