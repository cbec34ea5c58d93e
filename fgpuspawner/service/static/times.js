/* Times in the reader's own time zone and language, on the service's pages and on the Hub's. */
(function () {
  "use strict";

  const AGAIN_MS = 30000;
  // A range of a few minutes is shown as one instant.
  const NARROW_S = 600;
  // Made once: a long page has a thousand instants.
  const time = new Intl.DateTimeFormat([], { hour: "numeric", minute: "2-digit" });
  const dayAndTime = new Intl.DateTimeFormat([], { day: "numeric", month: "short", hour: "numeric", minute: "2-digit" });
  const yearToo = new Intl.DateTimeFormat([], { year: "numeric", month: "short", day: "numeric", hour: "numeric", minute: "2-digit" });
  const whole = new Intl.DateTimeFormat([], { dateStyle: "medium", timeStyle: "long" });

  /** Return the time; with the day, and the year, only where it is another one. */
  function clock(at_s) {
    const at = new Date(at_s * 1000), now = new Date();
    if (at.toDateString() === now.toDateString()) {
      return time.format(at);
    }
    return (at.getFullYear() === now.getFullYear() ? dayAndTime : yearToo).format(at);
  }

  /** Return the time, and how far from now it is: "14:20 (in 20 min)". Two days away, the day tells enough. */
  function when(at_s) {
    const ahead_s = at_s - Date.now() / 1000, minutes = Math.max(1, Math.round(Math.abs(ahead_s) / 60));
    if (minutes > 48 * 60) {
      return clock(at_s);
    }
    const far = minutes < 90 ? minutes + " min" : Math.round(minutes / 60) + " h";
    return clock(at_s) + (ahead_s < 0 ? " (" + far + " ago)" : " (in " + far + ")");
  }

  /** Return the range in which a forecast's start lies, or the instant where that is narrow. */
  function startWords(forecast) {
    const at_s = forecast.expected_start_at_s, early_s = forecast.early_start_at_s, late_s = forecast.late_start_at_s;
    if (!at_s) {
      return "";
    }
    if (forecast.basis === "time limits") {
      return "at the latest " + when(at_s);
    }
    return early_s === null || late_s === null || late_s - early_s < NARROW_S ? "about " + when(at_s)
      : "probably between " + clock(early_s) + " and " + clock(late_s);
  }

  /** Show instants in the reader's time zone; those with `data-near` also as far as they are from now. */
  function localise(root) {
    for (const element of root.querySelectorAll("time[datetime]")) {
      const at_s = Date.parse(element.dateTime) / 1000, text = ("near" in element.dataset ? when : clock)(at_s);
      if (element.textContent !== text) {
        element.textContent = text;
      }
      element.title = whole.format(at_s * 1000);
    }
  }

  /** Let an instant be typed in the reader's time zone. The form still sends it in UTC, as it does without scripts. */
  function typeLocally(input) {
    const at = new Date(input.value + "Z");
    if (!isNaN(at)) {
      input.value = new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 16);
    }
    input.form.addEventListener("formdata", function (event) {
      if (input.value) {
        event.formData.set(input.name, new Date(input.value).toISOString().slice(0, 16));
      }
    });
  }

  document.addEventListener("DOMContentLoaded", function () {
    document.querySelectorAll("input[data-utc]").forEach(typeLocally);
    localise(document);
    setInterval(function () {
      if (!document.hidden) {
        localise(document);
      }
    }, AGAIN_MS);
  });

  window.fgpu = { clock: clock, when: when, startWords: startWords, localise: localise };
})();
