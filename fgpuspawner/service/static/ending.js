/* What can be asked for a running session (keeping, extending, parking ...), and ending one after a question, without leaving the page. */
(function () {
  "use strict";

  // By the API's name of the wish: what is said when it is done, and when it is not.
  const WISHES = {
    keep: ["is kept", "kept"],
    extend: ["is extended", "extended"],
    park: ["is being parked", "parked"],
    wake: ["gets its GPU as soon as it is free", "given its GPU"],
    "never-park": ["keeps its GPU once it has it", "kept from being parked"],
    "may-park": ["may be parked again", "changed"],
  };

  /** Carry out the wish of a form without leaving the page. */
  function keepInPlace(root, page) {
    root.addEventListener("submit", async function (event) {
      const form = event.target.closest("form.wish");
      if (!form) {
        return;
      }
      event.preventDefault();
      const wish = form.dataset.wish;
      const [done, told] = WISHES[wish];
      const button = form.querySelector("button");
      button.disabled = true;
      let why = "the service cannot be reached";
      try {
        const answer = await fetch(page.prefix + "api/v1/sessions/" + form.dataset.id + "/" + wish, { method: "POST", headers: page.headers });
        if (answer.ok) {
          page.say(form.dataset.name + " " + done);
          page.soon();
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
      said.textContent = "Not " + told + ": " + why;
      page.say(form.dataset.name + " could not be " + told + ": " + why);
    });
  }

  /** Ask before a session is ended or a request cancelled; the page has the dialogue for it. */
  function askBeforeEnding(root, page) {
    const dialog = document.getElementById("confirm");
    const title = document.getElementById("confirm-title");
    const text = document.getElementById("confirm-text");
    const trouble = document.getElementById("confirm-trouble");
    const yes = document.getElementById("confirm-yes");
    const no = document.getElementById("confirm-no");
    const told = document.getElementById("confirm-told");
    const message = document.getElementById("confirm-message");
    let asked = null;

    root.addEventListener("submit", function (event) {
      const form = event.target.closest("form.power");
      if (!form || !dialog.showModal) {
        return;
      }
      event.preventDefault();
      asked = { id: form.dataset.id, name: form.dataset.name };
      const cancel = form.dataset.verb === "Cancel";
      const owner = form.dataset.user ? " of " + form.dataset.user : "";
      title.textContent = cancel ? "Cancel " + asked.name + owner + "?" : "End " + asked.name + owner + "?";
      text.textContent = cancel
        ? "It loses its place in the queue."
        : "Its programs stop, and what they have not saved is lost. Files in the home folder stay.";
      yes.textContent = cancel ? "Cancel the request" : "End the session";
      // Only administrators see the sessions of others.
      no.textContent = cancel ? "Keep waiting" : "Keep running";
      told.hidden = !form.dataset.user;
      message.value = "";
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
        const asked = { method: "DELETE", headers: page.headers };
        if (message.value.trim()) {
          asked.body = JSON.stringify({ message: message.value });
        }
        const answer = await fetch(page.prefix + "api/v1/sessions/" + session.id, asked);
        const body = answer.ok ? null : await answer.json().catch(() => null);
        if (answer.ok || (body && body.error && body.error.code === "already_ended")) {
          page.say(session.name + " ends");
          dialog.close();
          page.soon();
          return;
        }
        why = body && body.error ? body.error.message : "The service answered " + answer.status + ".";
      } catch (error) {
        // What is said below.
      }
      trouble.textContent = why;
      trouble.hidden = false;
      yes.disabled = false;
    });
  }

  Object.assign(window.fgpu, { keepInPlace: keepInPlace, askBeforeEnding: askBeforeEnding });
})();
