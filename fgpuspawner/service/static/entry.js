/* The form of an image: the service checks it while its fields are filled in. */
(function () {
  "use strict";

  const AFTER_MS = 400;

  document.addEventListener("DOMContentLoaded", function () {
    const form = document.querySelector("form.entry");
    const refused = document.getElementById("refused");
    let timer = 0;
    let asked = 0;

    function show(field, message) {
      const wrong = field ? form.elements.namedItem(field) : null;
      for (const one of form.querySelectorAll("[aria-invalid]")) {
        one.removeAttribute("aria-invalid");
        one.removeAttribute("aria-describedby");
      }
      refused.hidden = !message;
      refused.textContent = message;
      if (wrong) {
        wrong.setAttribute("aria-invalid", "true");
        wrong.setAttribute("aria-describedby", "refused");
        wrong.closest("label").append(refused);
      } else {
        form.querySelector(".buttons").before(refused);
      }
    }

    async function check() {
      const mine = ++asked;
      const body = new URLSearchParams(new FormData(form));
      body.set("check", "1");
      try {
        const answer = await fetch(location.href, { method: "POST", body });
        const found = answer.ok ? await answer.json() : { field: "", message: "" };
        // Only what was asked last counts, and a field that is still empty is no mistake yet.
        const empty = found.field && form.elements.namedItem(found.field) && !form.elements.namedItem(found.field).value;
        if (mine === asked) {
          show(empty ? "" : found.field, empty ? "" : found.message);
        }
      } catch (error) {
        // The service is away: the form is checked when it is sent.
      }
    }

    form.addEventListener("input", function () {
      clearTimeout(timer);
      timer = setTimeout(check, AFTER_MS);
    });
  });
})();
