/**
 * Lists that outlive a reload and are shared by a browser's tabs.
 */

/** The part of the browser's storage that is used. */
export interface IStorage {
  getItem(key: string): string | null;
  setItem(key: string, value: string): void;
}

const MAX_ITEMS = 200;

/** A list of texts in the browser's storage; in memory alone where it has none. */
export class StoredList {
  constructor(
    private readonly _key: string,
    private readonly _storage: IStorage | null
  ) {}

  get items(): string[] {
    try {
      const found: unknown = JSON.parse(
        this._storage?.getItem(this._key) ?? 'null'
      );
      if (Array.isArray(found)) {
        return found.filter(item => typeof item === 'string');
      }
    } catch {
      // Not readable, or another program's: as if nothing was kept.
    }
    return this._memory;
  }

  set items(items: string[]) {
    this._memory = items.slice(-MAX_ITEMS);
    try {
      this._storage?.setItem(this._key, JSON.stringify(this._memory));
    } catch {
      // Full or forbidden: until the next reload memory does.
    }
  }

  /** Add an item; return false if the list had it already. */
  addNew(item: string): boolean {
    const items = this.items;
    if (items.includes(item)) {
      return false;
    }
    this.items = [...items, item];
    return true;
  }

  private _memory: string[] = [];
}

/** Return the browser's storage, or null where it may not be used. */
export function browserStorage(): IStorage | null {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}
