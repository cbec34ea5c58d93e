/**
 * Notifications of the browser itself, for a hidden tab.
 */

/** Return whether the browser was told that this site may notify. */
export function mayNotify(): boolean {
  return window.Notification?.permission === 'granted';
}

/** Return whether the browser would ask its user, who has said neither yes nor no. */
export function canAsk(): boolean {
  return window.Notification?.permission === 'default';
}

/** Let the browser ask its user; to be called for a press of a key or a button. */
export async function askToNotify(): Promise<void> {
  await window.Notification?.requestPermission();
}

/** Notify; a press leads to this tab. `tag` is what it is of: the same is not shown twice. */
export function notify(text: string, tag: string): void {
  try {
    const shown = new window.Notification(text, { tag });
    shown.onclick = () => {
      window.focus();
      shown.close();
    };
  } catch {
    // On phones only service workers may; it is told when the tab is seen again.
  }
}
